"""`python -m bench NAME [--json] [--quick]`: run one bench, or `all` of them."""

from __future__ import annotations

import argparse
import importlib
import sys

from bench import report

NAMES = ("cold_s3", "cold_nfs", "warm", "small_files", "assimilation", "memory")


def main() -> int:
    """Run the named bench; 0 when every bar was met, 1 when one was missed."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("name", choices=[*NAMES, "all"])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="small data, few rounds: a rehearsal")
    arguments = parser.parse_args()
    rows: list[report.Row] = []
    for name in NAMES if arguments.name == "all" else [arguments.name]:
        rows += importlib.import_module(f"bench.{name}").run(quick=arguments.quick)
    print(report.as_json(rows) if arguments.json else report.as_table(rows))
    return 0 if all(one.met is not False for one in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
