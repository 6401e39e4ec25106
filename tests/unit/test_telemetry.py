import subprocess
import sys

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hsfs.telemetry.metrics import Registry


def test_text_is_what_prometheus_reads():
    registry = Registry()
    reads = registry.counter("hsfs_reads_total", "Reads.\nOf all kinds \\o/", tier='a"b\n')
    reads.add(3)
    assert registry.counter("hsfs_reads_total", "", tier='a"b\n') is reads
    registry.counter("hsfs_reads_total", "", tier="0").add(2.5)
    registry.gauge("hsfs_cache_bytes", "Bytes.", lambda: 7)
    registry.counter_from("hsfs_kept_total", "Kept elsewhere.", lambda: 9, backend="x")
    times = registry.histogram("hsfs_time_seconds", "Time.", (0.1, 1.0), op="read")
    for value in (0.05, 0.1, 0.5, 99):
        times.observe(value)
    found = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(registry.render().decode())
        for sample in family.samples
    }
    assert found[("hsfs_reads_total", (("tier", 'a"b\n'),))] == 3
    assert found[("hsfs_reads_total", (("tier", "0"),))] == 2.5
    assert found[("hsfs_cache_bytes", ())] == 7
    assert found[("hsfs_kept_total", (("backend", "x"),))] == 9
    assert found[("hsfs_time_seconds_bucket", (("le", "0.1"), ("op", "read")))] == 2
    assert found[("hsfs_time_seconds_bucket", (("le", "1"), ("op", "read")))] == 3
    assert found[("hsfs_time_seconds_bucket", (("le", "+Inf"), ("op", "read")))] == 4
    assert found[("hsfs_time_seconds_count", (("op", "read"),))] == 4
    assert found[("hsfs_time_seconds_sum", (("op", "read"),))] == pytest.approx(99.65)
    assert registry.values()['hsfs_reads_total{tier="0"}'] == 2.5
    with pytest.raises(ValueError, match="is a counter"):
        registry.gauge("hsfs_reads_total", "", lambda: 0)


def logged(code, level):
    script = f"from hsfs.telemetry.logs import set_up_logging\nset_up_logging('mount')\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"HSFS_LOG": level},
    )
    assert done.stdout == ""
    return done.stderr


def test_lines_of_both_loggers():
    code = (
        "import logging, structlog, warnings\n"
        "logging.getLogger('hsfs.x').info('hello %s', 'world')\n"
        "structlog.get_logger('hsfs.y').warning('50% done', name='a b', n=3)\n"
        "structlog.get_logger('hsfs.y').debug('hidden')\n"
        "logging.getLogger('botocore.auth').info('a header')\n"
        "try:\n    1/0\nexcept ZeroDivisionError:\n    logging.exception('failed')\n"
        "warnings.warn('careful')\n"
    )
    lines = logged(code, "info").splitlines()
    assert lines[0].split(" ", 1)[1].startswith("INFO mount[")
    assert lines[0].endswith("hsfs.x: hello world")
    assert lines[1].endswith("hsfs.y: 50% done name='a b' n=3")
    assert not any("hidden" in line or "header" in line for line in lines)
    assert any(line.startswith("    ZeroDivisionError") for line in lines)
    assert any("careful" in line for line in lines)
    assert "hidden" in logged(code, "debug")
    assert "hello" not in logged(code, "error")
