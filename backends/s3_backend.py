"""`s3://BUCKET/PREFIX`: a bucket, or what lies below a prefix of it, read in place.

Reads block in worker threads and go by `s3_read`; everything else is asked in threads of this
backend. Versions are ETags.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import TypeVar
from urllib.parse import unquote_to_bytes

import trio

from hsfs.backends.s3_answers import http_time
from hsfs.backends.s3_client import Access, Client
from hsfs.backends.s3_credentials import chain
from hsfs.backends.s3_keys import version_of
from hsfs.backends.s3_list import PageSource
from hsfs.backends.s3_read import FastPath, Reader
from hsfs.backends.s3_scan import MARKER, Lister
from hsfs.core.errors import ConfigError, HsfsError, NotFound, ProtocolError, UsageError
from hsfs.core.interruption import Interruption
from hsfs.core.ports import Interrupt
from hsfs.core.types import (
    Capabilities,
    Cursor,
    DeviceId,
    Extent,
    FileType,
    ObjectStat,
    Page,
    Place,
    Space,
    Version,
)
from hsfs.core.urls import split_url_options

Options = Mapping[str, str | int | float | bool]
T = TypeVar("T")

_CONCURRENCY = 16
_LIST_THREADS = 8
_REGION = "us-east-1"
_READ_MAX = 8 << 20


class S3Backend:
    """Backend and FlatLister. `base`: the key prefix of its root, b"" or ending in "/"."""

    def __init__(
        self, device: DeviceId, client: Client, base: bytes, fast: FastPath | None, concurrency: int
    ) -> None:
        self._device = device
        self._client = client
        self._base = base
        self._fast = fast
        self._reader = Reader(client, fast)
        self._pages = PageSource(client)
        self._lister = Lister(self._pages, base, threads=min(_LIST_THREADS, concurrency))
        self._limiter = trio.CapacityLimiter(concurrency)
        self._caps = Capabilities(
            flat=True,
            ordered=True,
            strong_versions=True,
            has_handles=False,
            pinned_reads=True,
            concurrency=concurrency,
            read_max=_READ_MAX,
            flat_list=True,
            announces=True,
        )

    @property
    def device(self) -> DeviceId:
        return self._device

    @property
    def caps(self) -> Capabilities:
        return self._caps

    async def stat(self, place: Place) -> ObjectStat:
        key = place.key
        if place.handle == MARKER or (key and not key.endswith(b"/")):
            return await self._ask(lambda stop: self._head(place, stop))
        return await self._ask(lambda stop: self._prefix(key, stop))

    def read_into(
        self,
        place: Place,
        offset: int,
        buf: memoryview,
        /,
        *,
        expect: Version | None,
        interrupt: Interrupt,
    ) -> int:
        return self._reader.read_into(self._base + place.key, offset, buf, expect, interrupt)

    def announce(self, place: Place, extent: Extent, /) -> None:
        self._reader.announce(self._base + place.key, extent.offset, extent.end)

    def scan(self, directory: Place, *, after: Cursor | None = None) -> AsyncIterator[Page]:
        """One level. `directory`: b"" or a prefix ending in "/". A prefix without keys is empty."""
        return self._lister.level(directory.key, after)

    def list_flat(self, prefix: Place, *, after: Cursor | None = None) -> AsyncIterator[Page]:
        """All keys below; the cursor is the last key."""
        return self._lister.flat(prefix.key, after)

    async def probe(self) -> Space:
        await self._ask(lambda stop: self._pages.probe(self._base, stop))
        return Space(total=0, free=0, available=0, known=False)

    async def aclose(self) -> None:
        self._client.close()
        self._reader.close()
        self._lister.close()
        if self._fast is not None:
            self._fast.close()
        await trio.lowlevel.checkpoint()

    async def _ask(self, ask: Callable[[Interruption], T]) -> T:
        """Run a blocking request in a thread; a cancelled one is interrupted and left behind."""
        stop = Interruption()
        try:
            return await trio.to_thread.run_sync(
                ask, stop, abandon_on_cancel=True, limiter=self._limiter
            )
        except trio.Cancelled:
            stop.set()
            raise

    def _head(self, place: Place, stop: Interruption) -> ObjectStat:
        patience = self._client.patience(stop)
        fields: Mapping[bytes, bytes] = {}
        while not fields:
            try:
                with self._client.ask(
                    "HEAD", self._base + place.key, "", "", stop, timeout_s=patience.left_s
                ) as reply:
                    fields = reply.fields
            except HsfsError as error:
                patience.pause(error)
        size, etag = fields.get(b"content-length", b""), fields.get(b"etag")
        if not size.isdigit() or etag is None:
            raise ProtocolError(self._client.name, "no size or no ETag in the answer to HEAD")
        mtime_ns = http_time(fields.get(b"last-modified", b"")) * 10**9
        return ObjectStat(
            name=place.key.rpartition(b"/")[2],
            type=FileType.FILE,
            place=place,
            size=int(size),
            mtime_ns=mtime_ns,
            ctime_ns=mtime_ns,
            version=version_of(etag),
        )

    def _prefix(self, key: bytes, stop: Interruption) -> ObjectStat:
        page = self._pages.page(self._base + key, stop, limit=1)
        # The root is there if the bucket is, even without a key.
        if key and not page.objects and not page.prefixes:
            raise NotFound("prefix", "no key begins with it")
        name = key[:-1].rpartition(b"/")[2]
        return ObjectStat(name=name, type=FileType.DIRECTORY, place=Place(key))


async def open_s3(device: DeviceId, url: str, options: Options) -> S3Backend:
    """The backend of an `s3://BUCKET[/PREFIX]` URL; nothing is asked of the server yet.

    Options: endpoint, region, profile, credentials (the path of a credentials file, or the name of
    a profile), anonymous, path_style, ca_bundle, timeout (s), concurrency. Raises UsageError,
    ConfigError.
    """
    bare, query = split_url_options(url)
    every: dict[str, str | int | float | bool] = {**query, **options}
    bucket, _, prefix = bare.removeprefix("s3://").partition("/")
    if not bare.startswith("s3://") or not bucket:
        raise UsageError(url, "not an s3://BUCKET/PREFIX URL")
    access = await trio.to_thread.run_sync(_access, bucket, every)
    base = unquote_to_bytes(prefix.rstrip("/"))
    concurrency = max(int(every.get("concurrency", _CONCURRENCY) or _CONCURRENCY), 1)
    client = Client(access, links=2 * concurrency + _LIST_THREADS)
    fast: FastPath | None = None
    if client.location.scheme == "https":
        from hsfs.backends.s3_obstore import ObstorePath

        fast = ObstorePath(client)
    return S3Backend(device, client, base + b"/" if base else b"", fast, concurrency)


def _access(bucket: str, options: Options) -> Access:
    """Read the options, and what they leave open from the AWS chain (files: may block)."""
    credentials = str(options.get("credentials") or "")
    is_file = "/" in credentials
    profile = str(options.get("profile") or ("" if is_file else credentials))
    asked = chain(profile, credentials if is_file else "")
    style = options.get("path_style")
    try:
        timeout_s = float(options.get("timeout", 30.0))
    except ValueError:
        raise ConfigError("timeout", "not a number of seconds") from None
    return Access(
        bucket=bucket,
        endpoint=str(options.get("endpoint") or asked.setting("endpoint_url")),
        region=str(options.get("region") or asked.setting("region") or _REGION),
        path_style=None if style is None else _truth(style),
        ca_bundle=str(options.get("ca_bundle") or asked.setting("ca_bundle")),
        timeout_s=timeout_s,
        chain=None if _truth(options.get("anonymous", False)) else asked,
    )


def _truth(value: str | float) -> bool:
    return (
        value.lower() in ("true", "1", "yes", "on", "") if isinstance(value, str) else bool(value)
    )
