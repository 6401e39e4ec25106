"""The command `hsfs`: finds the verb, imports only that, and turns errors into one line and an
exit code."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence

import click

from hsfs import __version__
from hsfs.cli import exits
from hsfs.cli.output import Output, debugging
from hsfs.core.errors import HsfsError, UsageError

# Verb -> (module with a click command named `command`, its line in `hsfs --help`).
VERBS: dict[str, tuple[str, str]] = {
    "mount": ("hsfs.cli.mount", "Mount a volume, or backends named on the command line."),
    "umount": ("hsfs.cli.umount", "Unmount; with --force even when nothing answers any more."),
    "mds": ("hsfs.cli.mds", "Serve a volume's metadata (mounts start it by themselves)."),
    "mover": ("hsfs.cli.mover", "Run jobs against the backends (mds starts one by itself)."),
    "backend": ("hsfs.cli.backend", "List or test the backends of a volume."),
    "assimilate": ("hsfs.cli.assimilate", "Scan the backends and wait for the end."),
    "refresh": ("hsfs.cli.refresh", "Ask the source about a path now."),
    "info": ("hsfs.cli.info", "Where a file's bytes are, and how fresh that is."),
    "status": ("hsfs.cli.status", "Mounts and their backends."),
    "stats": ("hsfs.cli.stats", "Counters of a mount."),
    "warmup": ("hsfs.cli.warmup", "Bring files into the cache."),
    "evict": ("hsfs.cli.evict", "Drop files from the cache."),
    "doctor": ("hsfs.cli.doctor", "Check this machine, and a volume if one is named."),
    "config": ("hsfs.cli.config", "Show a volume's settings and where they come from."),
}


class LazyGroup(click.Group):
    """Verbs by table: a verb's module is imported when that verb runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command = importlib.import_module(VERBS[cmd_name][0]).command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            import difflib

            close = difflib.get_close_matches(args[0], VERBS, n=1)
            raise UsageError(
                args[0],
                "there is no such verb",
                f'did you mean "{close[0]}"?' if close else "see hsfs --help",
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(verb, text) for verb, (_, text) in VERBS.items()])


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="One tree over many silos: NFS exports, buckets and local directories, mounted in place.",
)
@click.version_option(__version__, "--version", prog_name="hsfs")
def cli() -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the command `hsfs`."""
    own_process = arguments is None
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    verb = next((word for word in arguments if not word.startswith("-")), "")
    code_of = exits.mount_exit_code if verb == "mount" else exits.exit_code
    run(
        "hsfs",
        lambda: cli.main(arguments, prog_name="hsfs", standalone_mode=False),
        arguments,
        code_of,
        own_process,
    )


def run(
    program: str,
    body: Callable[[], object],
    arguments: Sequence[str],
    code_of: Callable[[HsfsError], int],
    own_process: bool,
) -> None:
    """Run a command's body and exit: with its whole-number result, or as its error says.

    With own_process the process is about to end: once its exit code is known Ctrl-C can't change
    it any more, or one that arrives while the interpreter ends would kill it by the signal.
    """
    try:
        code = _outcome(program, body, arguments, code_of)
    except KeyboardInterrupt:  # A second Ctrl-C, while the first or an error was being told.
        code = exits.INTERRUPTED
    if own_process:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


def _outcome(
    program: str,
    body: Callable[[], object],
    arguments: Sequence[str],
    code_of: Callable[[HsfsError], int],
) -> int:
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    output = Output(json="--json" in options)
    try:
        code = body()
        return code if isinstance(code, int) else exits.OK
    except click.exceptions.Exit as e:
        return e.exit_code
    except (click.Abort, KeyboardInterrupt):
        if not output.json:
            sys.stderr.write("\n")
        return exits.INTERRUPTED
    except click.ClickException as e:
        return _fail(output, _usage(e, program), code_of)
    except HsfsError as e:
        return _fail(output, e, code_of)
    except BrokenPipeError:
        # The reader of our output went away (`hsfs status | head`): not worth a word.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return exits.FAILED
    except Exception as e:
        internal = HsfsError(
            program,
            f"internal error: {type(e).__name__}: {e}",
            "run it again with HSFS_DEBUG=1 and report the traceback",
        )
        return _fail(output, internal, code_of)


def _usage(error: click.ClickException, program: str) -> UsageError:
    path = program
    if isinstance(error, click.UsageError) and error.ctx is not None:
        path = error.ctx.command_path
    message = error.format_message().rstrip(".")
    message = message[:1].lower() + message[1:]
    what = path.removeprefix("hsfs ")
    return UsageError(what, message, f"see {path} --help")


def _fail(output: Output, error: HsfsError, code_of: Callable[[HsfsError], int]) -> int:
    if debugging():
        import traceback

        traceback.print_exc()
    output.error(error)
    return code_of(error)
