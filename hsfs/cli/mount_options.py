"""`-o` words of `hsfs mount` and `mount.hsfs`: what each means, and which are accepted for the
sake of fstab and ignored."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field

from hsfs.core.errors import UsageError

# Words for mount(8), systemd or the boot order, never for the file system.
_IGNORED = frozenset(
    (
        *("_netdev", "_rnetdev", "nofail", "fail", "auto", "noauto", "defaults", "quiet"),
        *("user", "nouser", "users", "owner", "group", "nogroup"),
        *("loud", "silent", "mand", "nomand"),
    )
)
_IGNORED_PREFIXES = ("x-", "X-", "comment=", "user=", "uhelper=", "helper=")
# Flags of the mount itself. FUSE has nosuid,nodev by default; fusermount3 refuses suid and dev.
_PASSED = frozenset(("noexec", "nosuid", "nodev", "noatime", "nodiratime"))
_MEANINGLESS = frozenset(
    (
        *("exec", "suid", "dev", "sync", "async", "dirsync", "ro", "default_permissions"),
        *("atime", "diratime", "relatime", "norelatime", "strictatime", "nostrictatime"),
        *("lazytime", "nolazytime", "iversion", "noiversion", "symfollow"),
    )
)
_FLAGS = ("allow_other", "strict", "anonymous")
_VALUES = (
    "cache_dir",
    "cache_size",
    "memory_limit",
    "fd_limit",
    "readahead",
    "session",
    "fsname",
)
_SESSIONS = ("auto", "kernel", "pyfuse3")


@dataclass(frozen=True, slots=True)
class OptionWords:
    """`values` holds `key=value` words as text; `passed` are flags for the mount itself; `notes`
    what the user should be told."""

    allow_other: bool = False
    strict: bool = False
    anonymous: bool = False
    values: dict[str, str] = field(default_factory=dict)
    passed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def split_words(text: str) -> list[str]:
    """Words of one `-o`: commas separate, a backslash keeps the next character."""
    words, word, escaped = [], "", False
    for character in text:
        if escaped:
            word, escaped = word + character, False
        elif character == "\\":
            escaped = True
        elif character == ",":
            words.append(word)
            word = ""
        else:
            word += character
    return [w for w in [*words, word] if w]


def parse_options(texts: Sequence[str], *, sloppy: bool = False) -> OptionWords:
    """All `-o` texts together; a later word wins. `sloppy` ignores unknown words, as mount -s does.
    Raises UsageError."""
    flags: set[str] = set()
    values: dict[str, str] = {}
    passed: list[str] = []
    notes: list[str] = []
    for word in [w for text in texts for w in split_words(text)]:
        key, equals, value = word.partition("=")
        if word in _IGNORED or word.startswith(_IGNORED_PREFIXES) or word in _MEANINGLESS:
            continue
        if word in _PASSED:
            passed.append(word)
        elif word == "rw":
            notes.append("mounted read-only: writing is not in this version")
        elif word == "remount":
            raise UsageError("-o remount", "can't be done", "unmount and mount again")
        elif key in _FLAGS and not equals:
            flags.add(key)
        elif key in _VALUES and equals and value:
            if key == "session" and value not in _SESSIONS:
                raise UsageError(f"-o {word}", f"must be one of {', '.join(_SESSIONS)}")
            values[key] = value
        elif key in _VALUES:
            raise UsageError(f"-o {word}", "needs a value", f"write {key}=...")
        elif key in _FLAGS:
            raise UsageError(f"-o {word}", "takes no value", f"write {key}")
        elif not sloppy:
            known = [*_FLAGS, *_VALUES, *_PASSED]
            close = difflib.get_close_matches(key, known, n=1)
            hint = f'did you mean "{close[0]}"?' if close else f"known are: {', '.join(known)}"
            raise UsageError(f"-o {word}", "unknown mount option", hint)
    return OptionWords(
        allow_other="allow_other" in flags,
        strict="strict" in flags,
        anonymous="anonymous" in flags,
        values=values,
        passed=tuple(dict.fromkeys(passed)),
        notes=tuple(dict.fromkeys(notes)),
    )
