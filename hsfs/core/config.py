"""The volume: what is mounted, from where and how, read from a volume file or a command line.

Everything is checked before anything starts, and every complaint names the file and line (or the
option of the command line) and what to do. Secrets have no place here: nodes resolve credentials
by their own chains.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec

from hsfs.core import settings
from hsfs.core.errors import ConfigError
from hsfs.core.settings import Key, Setting, Unset
from hsfs.core.toml_lines import Path as TomlPath
from hsfs.core.toml_lines import key_lines, line_of
from hsfs.core.urls import scheme_of, split_url_options

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_LATER_SCHEMES = ("gs", "az")
# What stays in the URL of an NFS backend: it is the server's address, not a setting of ours.
_NFS_ADDRESS = ("port", "mountport")
_SECRETS = re.compile(r"secret|password|passwd|token|access_key|account_key|sas", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class BackendConfig:
    """One `[[backend]]`. `options` holds every other key, normalised (bytes, seconds, integers)."""

    name: str
    url: str
    at: str
    options: Mapping[str, Setting] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Tier 0. `size` in bytes; None = min(50% of free, 64G), decided when the mount starts."""

    dir: Path
    size: int | None = None


@dataclass(frozen=True, slots=True)
class MountConfig:
    """Bounds of one mount: bytes, file descriptors (None = 80% of the soft limit), readahead in
    bytes (None = automatic)."""

    memory_limit: int = 512 * 1024**2
    fd_limit: int | None = None
    readahead: int | None = None


@dataclass(frozen=True, slots=True)
class MdsConfig:
    """HOST:PORT of the metadata server's RPC and HTTP faces; None = its unix socket only."""

    listen: str | None = None
    http: str | None = None


@dataclass(frozen=True, slots=True)
class Volume:
    """A whole volume. `source` is its file, None when it came from a command line. `origins` says
    where each value was set: "backend.nas1.url" -> "volume.toml:7"; what is absent is a default."""

    name: str
    state: Path
    backends: tuple[BackendConfig, ...]
    cache: CacheConfig
    mount: MountConfig = MountConfig()
    mds: MdsConfig = MdsConfig()
    store: str = "lmdb"
    source: Path | None = None
    origins: Mapping[str, str] = field(default_factory=dict)


def encode_volume(volume: Volume) -> bytes:
    """The volume as JSON, to hand to a child process."""
    return msgspec.json.encode(volume, enc_hook=_path_to_text)


def decode_volume(text: bytes) -> Volume:
    """Inverse of `encode_volume`. Raises ConfigError."""
    try:
        return msgspec.json.decode(text, type=Volume, dec_hook=_path_from_text)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise ConfigError("volume definition", str(e), "start the command again") from e


def _path_to_text(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(type(value).__name__)


def _path_from_text(wanted: type, value: object) -> Path:
    if issubclass(wanted, Path) and isinstance(value, str):
        return Path(value)
    raise NotImplementedError(wanted.__name__)


def default_state(name: str) -> Path:
    """Where a volume keeps its state: /var/lib/hsfs/NAME as root, else below $XDG_STATE_HOME."""
    if os.geteuid() == 0:
        return Path("/var/lib/hsfs") / name
    home = os.environ.get("XDG_STATE_HOME", "")
    base = Path(home) if home.startswith("/") else Path.home() / ".local" / "state"
    return base / "hsfs" / name


def load_volume(path: Path | str) -> Volume:
    """The volume that the file describes. Raises ConfigError naming file and line."""
    path = Path(path)
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError:
        raise ConfigError(
            str(path), "no such volume file", "see README.md, or mount with --backend AT=URL"
        ) from None
    except OSError as e:
        raise ConfigError(str(path), f"can't be read: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise ConfigError(str(path), f"is not UTF-8 text: {e.reason}") from e
    return parse_volume(text, path)


def parse_volume(text: str, source: Path) -> Volume:
    """As `load_volume`, for a text that stands (or would stand) in the file `source`."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        reason, line = _split_position(str(e), text)
        raise ConfigError(f"{source}:{line}", f"is not TOML: {reason}") from None
    return _Reader(source, document, key_lines(text)).volume()


def _split_position(message: str, text: str) -> tuple[str, int]:
    match = re.search(r" \(at line (\d+), column (\d+)\)$", message)
    if match is not None:
        return f"{message[: match.start()]} (column {match[2]})", int(match[1])
    reason = message.removesuffix(" (at end of document)")
    return f"{reason} (at its end)", text.rstrip("\n").count("\n") + 1


class _Reader:
    """One pass over a parsed volume file."""

    def __init__(
        self, source: Path, document: Mapping[str, object], lines: Mapping[TomlPath, int]
    ) -> None:
        self._source = source
        self._document = document
        self._lines = lines
        self._origins: dict[str, str] = {}

    def _place(self, *path: str | int) -> str:
        return f"{self._source}:{line_of(self._lines, path)}"

    def _fail(self, path: TomlPath, why: str, next_step: str = "") -> ConfigError:
        return ConfigError(self._place(*path), why, next_step)

    def volume(self) -> Volume:
        for table in self._document:
            if table not in settings.TABLES:
                raise self._fail(
                    (table,),
                    f'unknown table or key "{table}"',
                    _did_you_mean(table, settings.TABLES),
                )
        volume = self._table("volume", self._single("volume"))
        if "name" not in volume:
            raise self._fail(("volume",), "[volume] has no name", 'add name = "..." to [volume]')
        name = str(volume["name"])
        if not _NAME.fullmatch(name):
            raise self._fail(("volume", "name"), _bad_name("volume", name))
        base = self._source.absolute().parent
        state = default_state(name)
        if "state" in volume:
            state = _absolute(base, str(volume["state"]))
        cache = self._table("cache", self._single("cache"))
        cache_dir = _absolute(base, str(cache["dir"])) if "dir" in cache else state / "cache"
        if cache_dir == state or cache_dir in state.parents:
            raise self._fail(
                ("cache", "dir"),
                "the cache can't hold the state of the volume",
                "use a folder of its own",
            )
        mount = self._table("mount", self._single("mount"))
        mds = self._table("mds", self._single("mds"))
        backends = self._backends(base, (state, cache_dir))
        write_to = volume.get("write_to")
        if write_to is not None and write_to not in {b.name for b in backends}:
            raise self._fail(
                ("volume", "write_to"),
                f'there is no backend named "{write_to}"',
                _did_you_mean(str(write_to), [b.name for b in backends]),
            )
        return Volume(
            name=name,
            state=state,
            backends=backends,
            cache=CacheConfig(cache_dir, _int(cache.get("size"))),
            mount=MountConfig(
                memory_limit=int(mount["memory_limit"]),
                fd_limit=_int(mount.get("fd_limit")),
                readahead=None if mount["readahead"] == "auto" else _int(mount["readahead"]),
            ),
            mds=MdsConfig(_str(mds.get("listen")), _str(mds.get("http"))),
            store=str(volume["store"]),
            source=self._source.absolute(),
            origins=self._origins,
        )

    def _single(self, name: str) -> Mapping[str, object]:
        table = self._document.get(name, {})
        if not isinstance(table, dict):
            written = f"[[{name}]]" if isinstance(table, list) else f"{name} = ..."
            raise self._fail((name,), f"{written} must be one table", f"write [{name}]")
        return table

    def _table(
        self, name: str, table: Mapping[str, object], where: TomlPath = ()
    ) -> dict[str, Setting]:
        where = where or (name,)
        keys = settings.TABLES[name]
        values: dict[str, Setting] = {}
        for key, value in table.items():
            if key not in keys:
                raise self._fail((*where, key), *_unknown(name, key))
            try:
                values[key] = keys[key].parse(value, False)
            except ValueError as e:
                raise self._fail((*where, key), f"{key} {e}") from None
            if name != "backend":
                self._origins[f"{name}.{key}"] = self._place(*where, key)
        _fill_defaults(keys, values)
        return values

    def _backends(self, base: Path, own: Iterable[Path]) -> tuple[BackendConfig, ...]:
        tables = self._document.get("backend", [])
        if not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
            raise self._fail(("backend",), "backends are a list of tables", "write [[backend]]")
        found: list[BackendConfig] = []
        for index, table in enumerate(tables):
            where: TomlPath = ("backend", index)
            values = self._table("backend", table, where)
            for required in ("name", "url"):
                if required not in values:
                    raise self._fail(
                        where, f"[[backend]] has no {required}", f'add {required} = "..." below it'
                    )
            name = str(values["name"])
            try:
                backend = _backend(values, set(table), len(found), base)
                _check_beside(backend, found, own)
            except _BadKey as e:
                raise self._fail((*where, e.key), e.why, e.next_step) from None
            self._origins.update(
                {f"backend.{name}.{key}": self._place(*where, key) for key in table}
            )
            found.append(backend)
        if not found:
            raise self._fail((), "the volume has no backend", "add a [[backend]] with name and url")
        return tuple(found)


class _BadKey(Exception):
    """A complaint about one key of a backend; the caller knows where it stands."""

    def __init__(self, key: str, why: str, next_step: str = "") -> None:
        super().__init__(key, why)
        self.key = key
        self.why = why
        self.next_step = next_step


def _backend(
    values: Mapping[str, Setting], written: set[str], index: int, base: Path
) -> BackendConfig:
    """A checked backend from normalised values; options behind the URL count as written."""
    name = str(values["name"])
    if not _NAME.fullmatch(name):
        raise _BadKey("name", _bad_name("backend", name))
    url, query = split_url_options(str(values["url"]))
    options = dict(values)
    kept: list[str] = []
    scheme = _scheme_of(url)
    for key, text in query.items():
        if key in ("name", "url", "at") or key not in settings.BACKEND:
            raise _BadKey("url", *_unknown("backend", key))
        if key in written:
            raise _BadKey("url", f'"{key}" is set twice: in the URL and as a key')
        if scheme == "nfs" and key in _NFS_ADDRESS:
            kept.append(f"{key}={text}")
        try:
            options[key] = settings.BACKEND[key].parse(text, True)
        except ValueError as e:
            raise _BadKey("url", f"{key} {e}") from None
        written.add(key)
    url = _checked_url(url, base)
    for key in written:
        schemes = settings.BACKEND[key].schemes
        if schemes and scheme not in schemes:
            kinds = ", ".join(f"{word}://" for word in schemes)
            raise _BadKey(
                key if key in values else "url",
                f'"{key}" belongs to {kinds} backends, not {scheme}://',
            )
    at = _checked_at(str(options.get("at", "/" + name)))
    for key in ("name", "url", "at"):
        options.pop(key, None)
    options.setdefault("priority", index)
    if kept:
        url = f"{url}?{'&'.join(kept)}"
    elif scheme == "nfs" and any(key in options for key in _NFS_ADDRESS):
        url = f"{url}?" + "&".join(f"{k}={options[k]}" for k in _NFS_ADDRESS if k in options)
    return BackendConfig(name, url, at, options)


def _scheme_of(url: str) -> str:
    return scheme_of(url) if "://" in url else ""


def _checked_url(url: str, base: Path) -> str:
    scheme = _scheme_of(url)
    if not scheme:
        if url.startswith(("/", "./", "../", "~/")):
            path = str(_absolute(base, url))
            return "file://" + path.replace("%", "%25").replace("?", "%3F")
        raise _BadKey(
            "url",
            f"{url!r} is not a URL",
            "use file:///dir, nfs://host/export or s3://bucket/prefix",
        )
    if scheme not in settings.SCHEMES:
        raise _BadKey(
            "url", f"unknown kind of URL {scheme}://", _did_you_mean(scheme, settings.SCHEMES)
        )
    if scheme in _LATER_SCHEMES:
        raise _BadKey("url", f"{scheme}:// is not in this version", "use file://, nfs:// or s3://")
    rest = url.split("://", 1)[1]
    authority, slash, path = rest.partition("/")
    if "@" in authority:
        raise _BadKey(
            "url", "credentials never stand in a URL", "use the standard chain, or profile = ..."
        )
    if scheme == "file":
        if authority not in ("", "localhost"):
            raise _BadKey("url", f"file:// has no host: {authority!r}", f"write file:///{rest}")
        return f"file:///{path}"
    if scheme == "nfs":
        _check_port(url)
        if not slash or not authority:
            raise _BadKey("url", "names no export", "write nfs://HOST/EXPORT")
    if scheme == "s3" and not authority:
        raise _BadKey("url", "names no bucket", "write s3://BUCKET or s3://BUCKET/PREFIX")
    return f"{scheme}://{rest}"


def _check_port(url: str) -> None:
    try:
        _ = urlsplit(url).port
    except ValueError:
        raise _BadKey("url", "has a bad port", "write nfs://HOST:2049/EXPORT") from None


def _checked_at(at: str) -> str:
    """Absolute, without empty segments; the root is "/"."""
    if not at.startswith("/"):
        raise _BadKey("at", f"must be an absolute path in the mount, not {at!r}", f'write "/{at}"')
    segments = [segment for segment in at.split("/") if segment]
    for segment in segments:
        if segment in (".", ".."):
            raise _BadKey("at", f"{at!r} must not hold . or ..")
        if len(os.fsencode(segment)) > 255 or "\0" in segment:
            raise _BadKey("at", f"{at!r} holds a name that no directory can have")
    if segments[:1] == [".hsfs"]:
        raise _BadKey("at", "/.hsfs belongs to hsfs itself", "choose another directory")
    return "/" + "/".join(segments)


def _check_beside(
    backend: BackendConfig, others: Sequence[BackendConfig], own: Iterable[Path]
) -> None:
    for other in others:
        if other.name == backend.name:
            raise _BadKey("name", f'two backends are named "{backend.name}"', "rename one of them")
        if (other.url, other.at) == (backend.url, backend.at):
            raise _BadKey(
                "url", f'"{other.name}" has the same url and the same at', "drop one of them"
            )
    root = file_root(backend)
    if root is None:
        return
    for path in own:
        if root == path or root in path.parents:
            raise _BadKey(
                "url",
                f"the backend {root} would hold hsfs's own files ({path})",
                "move state and cache.dir out of it",
            )


def file_root(backend: BackendConfig) -> Path | None:
    """The directory of a file:// backend, None for others."""
    if not backend.url.startswith("file://"):
        return None
    return Path(os.path.normpath(unquote(backend.url.removeprefix("file://"))))


def _fill_defaults(keys: Mapping[str, Key], values: dict[str, Setting]) -> None:
    for key, entry in keys.items():
        if not isinstance(entry.default, Unset):
            values.setdefault(key, entry.default)


def _unknown(table: str, key: str) -> tuple[str, str]:
    written = "[[backend]]" if table == "backend" else f"[{table}]"
    if table == "backend" and _SECRETS.search(key):
        return (
            f'"{key}" looks like a secret, and secrets never stand in a volume file or a URL',
            "use the standard chain (AWS_* variables, ~/.aws) and profile = ...",
        )
    for other, keys in settings.TABLES.items():
        if other != table and key in keys and key not in ("name", "site"):
            place = "[[backend]]" if other == "backend" else f"[{other}]"
            return f'unknown key "{key}" in {written}', f"it belongs to {place}"
    return f'unknown key "{key}" in {written}', _did_you_mean(key, settings.TABLES[table])


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if close:
        return f'did you mean "{close[0]}"?'
    return f"known are: {', '.join(known)}" if len(known) <= 12 else "see docs/config.md"


def _bad_name(what: str, name: str) -> str:
    return (
        f"{name!r} is no name for a {what}: letters, digits, dot, dash and underscore, "
        "at most 63, starting with a letter or digit"
    )


def _absolute(base: Path, text: str) -> Path:
    return Path(os.path.normpath(base / os.path.expanduser(text)))


def _int(value: Setting | None) -> int | None:
    return None if value is None else int(value)


def _str(value: Setting | None) -> str | None:
    return None if value is None else str(value)


def volume_name(mountpoint: Path | str) -> str:
    """The name of a volume without a file: readable, and different for different mountpoints."""
    path = os.path.abspath(mountpoint)
    words = re.sub(r"[^A-Za-z0-9._]+", "-", path).strip("-.") or "root"
    digest = hashlib.blake2b(os.fsencode(path), digest_size=4).hexdigest()
    return f"{words[-48:].lstrip('-.')}-{digest}"


def volume_from_backends(
    mountpoint: Path | str, specs: Sequence[str], *, anonymous: bool = False
) -> Volume:
    """A volume from `AT=URL[?key=value&...]` words. `anonymous` is the default of every object
    store among them. Raises ConfigError naming the word."""
    name = volume_name(mountpoint)
    state = default_state(name)
    cache_dir = state / "cache"
    origins: dict[str, str] = {}
    backends: list[BackendConfig] = []
    for spec in specs:
        at, equals, url = spec.partition("=")
        what = f"--backend {spec.partition('?')[0]}"
        if not equals or not at.startswith("/"):
            raise ConfigError(what, "is not AT=URL", "write --backend /data=s3://bucket/prefix")
        values: dict[str, Setting] = {"url": url, "at": at}
        _fill_defaults(settings.BACKEND, values)
        try:
            if not url:
                raise _BadKey("url", "has no URL", "write --backend /data=s3://bucket/prefix")
            values["name"] = _free_name(at, url, [b.name for b in backends])
            if anonymous and _scheme_of(url) in settings.OBJECT_SCHEMES and "anonymous=" not in url:
                values["anonymous"] = True
            written = {"url", "at"}
            backend = _backend(values, written, len(backends), Path.cwd())
            _check_beside(backend, backends, (state, cache_dir))
        except _BadKey as e:
            raise ConfigError(what, e.why, e.next_step) from None
        origins.update({f"backend.{backend.name}.{key}": "--backend" for key in written})
        if "anonymous" in values:
            origins[f"backend.{backend.name}.anonymous"] = "--anonymous"
        backends.append(backend)
    if not backends:
        raise ConfigError("mount", "no SOURCE and no --backend", "name a volume file, or --backend")
    return Volume(
        name=name,
        state=state,
        backends=tuple(backends),
        cache=CacheConfig(cache_dir),
        origins=origins,
    )


def _free_name(at: str, url: str, taken: Sequence[str]) -> str:
    """A backend's name from the last segment of `at`, or of the URL for the root."""
    path = at.strip("/") or split_url_options(url)[0].rstrip("/")
    word = re.sub(r"[^A-Za-z0-9._-]+", "-", path.rsplit("/", 1)[-1]).strip("-._")[:56] or "root"
    name, count = word, 1
    while name in taken:
        count += 1
        name = f"{word}-{count}"
    return name


def with_cache(volume: Volume, directory: Path | None, size: str | None, origin: str) -> Volume:
    """The volume with another cache directory or size (as text). Raises ConfigError."""
    cache = volume.cache
    origins = dict(volume.origins)
    if directory is not None:
        path = Path(os.path.abspath(directory))
        if path == volume.state or path in volume.state.parents:
            raise ConfigError(origin, "the cache can't hold the state of the volume")
        cache = replace(cache, dir=path)
        origins["cache.dir"] = origin
    if size is not None:
        cache = replace(
            cache, size=int(_parsed(settings.CACHE["size"], "cache size", size, origin))
        )
        origins["cache.size"] = origin
    for backend in volume.backends:
        root = file_root(backend)
        if root is not None and (root == cache.dir or root in cache.dir.parents):
            raise ConfigError(
                origin, f"the backend {root} would hold the cache", "choose a folder outside of it"
            )
    return replace(volume, cache=cache, origins=origins)


def with_mount_options(volume: Volume, options: Mapping[str, str], origin: str) -> Volume:
    """The volume with keys of [mount] given as text. Raises ConfigError."""
    mount = volume.mount
    origins = dict(volume.origins)
    for key, text in options.items():
        value = _parsed(settings.MOUNT[key], key, text, origin)
        if key == "memory_limit":
            mount = replace(mount, memory_limit=int(value))
        elif key == "fd_limit":
            mount = replace(mount, fd_limit=int(value))
        elif key == "readahead":
            mount = replace(mount, readahead=None if value == "auto" else int(value))
        origins[f"mount.{key}"] = origin
    return replace(volume, mount=mount, origins=origins)


def _parsed(key: Key, name: str, text: str, origin: str) -> Setting:
    try:
        return key.parse(text, True)
    except ValueError as e:
        raise ConfigError(origin, f"{name} {e}") from None
