"""What a verb says: one JSON object or text on stdout, progress and one-line errors on stderr."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hsfs.core.errors import HsfsError

if TYPE_CHECKING:
    from rich.progress import Progress

SCHEMA = 1
_PLAIN_PROGRESS_S = 10.0

Json = dict[str, object]


def debugging() -> bool:
    """HSFS_DEBUG=1: tracebacks instead of one-line errors."""
    return os.environ.get("HSFS_DEBUG", "") not in ("", "0")


def shown(text: str) -> str:
    """Text fit for a terminal: control characters and lone surrogates become escapes, so that no
    file name can steer it."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )


def error_object(error: HsfsError) -> Json:
    """`{"schema": 1, "error": {code, what, why, next}}`."""
    return {
        "schema": SCHEMA,
        "error": {
            "code": error.code,
            "what": error.what,
            "why": error.why,
            "next": error.next_step,
        },
    }


class Steps(Protocol):
    """Where long work reports how far it is."""

    def update(self, done: float, total: float | None, text: str, detail: Json) -> None: ...


@dataclass(frozen=True, slots=True)
class Output:
    """How this run of a verb talks."""

    json: bool = False

    def result(self, value: Mapping[str, object], text: str | Sequence[str] = "") -> None:
        """The verb's result: `value` with `--json`, else `text` (a list: one line each)."""
        if self.json:
            _write(json.dumps({"schema": SCHEMA, **value}, allow_nan=False) + "\n")
        else:
            lines = [text] if isinstance(text, str) else text
            _write("".join(f"{line}\n" for line in lines if line or len(lines) > 1))

    def warn(self, text: str) -> None:
        """One line on stderr (a JSON line with `--json`)."""
        self._note({"warning": text}, f"hsfs: warning: {shown(text)}")

    def note(self, text: str) -> None:
        """One line on stderr that is no trouble."""
        self._note({"note": text}, f"hsfs: {shown(text)}")

    def _note(self, value: Json, text: str) -> None:
        _write_error((json.dumps(value) if self.json else text) + "\n")

    def error(self, error: HsfsError) -> None:
        """The one line (or the JSON object on stdout) for an error that ends the verb."""
        if self.json:
            _write(json.dumps(error_object(error)) + "\n")
        else:
            _write_error(f"hsfs: {shown(str(error))}\n")

    @contextmanager
    def progress(self, title: str) -> Iterator[Steps]:
        """Progress of long work: a bar on a terminal, JSON lines with `--json`, else a line now and
        then."""
        if self.json:
            yield _JsonSteps()
        elif sys.stderr.isatty():
            with _bar() as bar:
                yield _BarSteps(bar, title)
        else:
            yield _PlainSteps(title)


def _write(text: str) -> None:
    # Names that are no UTF-8 leave as the bytes that they are.
    data = text.encode(errors="surrogateescape")
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _write_error(text: str) -> None:
    sys.stderr.write(text.encode(errors="backslashreplace").decode())
    sys.stderr.flush()


class _JsonSteps:
    def update(self, done: float, total: float | None, text: str, detail: Json) -> None:
        _write_error(json.dumps({"progress": detail}) + "\n")


class _PlainSteps:
    def __init__(self, title: str) -> None:
        self._title = title
        self._said = time.monotonic()

    def update(self, done: float, total: float | None, text: str, detail: Json) -> None:
        now = time.monotonic()
        if now - self._said >= _PLAIN_PROGRESS_S:
            self._said = now
            _write_error(f"hsfs: {self._title}: {shown(text)}\n")


class _BarSteps:
    def __init__(self, bar: Progress, title: str) -> None:
        self._bar = bar
        self._task = bar.add_task(title, total=None, text="")

    def update(self, done: float, total: float | None, text: str, detail: Json) -> None:
        self._bar.update(self._task, completed=done, total=total, text=shown(text))


def _bar() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[text]}", markup=False),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
