"""Reads over TLS by obstore: decryption and copies in Rust, without the GIL.

It declines (None) whatever it can't deliver at once, instead of raising: its errors say too little
to act on, and the wire asks again. A declined read costs one round trip, and comes with trouble.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

import obstore
import obstore.exceptions
from obstore.store import S3Store

from hsfs.backends.s3_client import Client
from hsfs.backends.s3_keys import version_of
from hsfs.backends.s3_read import Parked
from hsfs.core.errors import HsfsError, Interrupted
from hsfs.core.ports import Interrupt
from hsfs.core.types import Version

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Credential  # stand in the stubs alone

_PIECE: Final = 1 << 20
_KEPT: Final = timedelta(seconds=60)  # the chain behind keeps and refreshes by itself


_Piece = obstore.Bytes | bytes


class _Content:
    """Body of s3_read over obstore's pieces, which are Bytes of any size."""

    def __init__(self, pieces: Iterator[_Piece], interrupt: Interrupt, name: str) -> None:
        self._pieces = pieces
        self._interrupt = interrupt
        self._name = name
        self._rest = memoryview(b"")

    @property
    def fields(self) -> Mapping[bytes, bytes]:
        # Whether the bucket encrypts with KMS (then the ETag is no MD5) is in a header that
        # obstore does not show, and TLS guards the way already: no MD5 of what comes from here.
        return {}

    def read_into(self, view: memoryview, /) -> int:
        done = 0
        while done < len(view):
            if not self._rest:
                if self._interrupt.interrupted:
                    raise Interrupted(self._name)
                try:
                    self._rest = memoryview(next(self._pieces))
                except (StopIteration, obstore.exceptions.BaseError, OSError):
                    return done
            size = min(len(view) - done, len(self._rest))
            view[done : done + size] = self._rest[:size]
            self._rest = self._rest[size:]
            done += size
        return done

    def suspend(self) -> None:
        pass

    def resume(self, interrupt: Interrupt, /) -> None:
        self._interrupt = interrupt

    def close(self) -> None:
        self._rest = memoryview(b"")
        self._pieces = iter(())


class ObstorePath:
    """FastPath of s3_read by obstore."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._origin = ""
        self._store: S3Store | None = None

    def open(
        self, key: bytes, offset: int, end: int, pin: Version | None, interrupt: Interrupt
    ) -> Parked | None:
        if interrupt.interrupted:
            raise Interrupted(self._client.name)
        try:
            options: obstore.GetOptions = {"range": (offset, end)}
            if pin is not None:
                options["if_match"] = f'"{pin.decode("latin-1")}"'
            result = obstore.get(self._current(), key.decode(), options=options)
            meta = result.meta
            start, stop = result.range
            etag = meta.get("e_tag")
            if etag is None or start != offset or stop > end:
                return None
            version = version_of(etag.encode("latin-1"))
            if pin is not None and version != pin:
                return None
            size = stop - start
            whole = size <= _PIECE
            pieces: Iterator[_Piece] = iter((result.bytes(),) if whole else result.stream(_PIECE))
        except (obstore.exceptions.BaseError, OSError, ValueError, HsfsError):
            return None
        return Parked(_Content(pieces, interrupt, self._client.name), size, version, meta["size"])

    def close(self) -> None:
        self._store = None

    def _current(self) -> S3Store:
        """The store for where the bucket is now (the client may learn of another region)."""
        location = self._client.location
        if self._store is None or self._origin != location.origin:
            self._store, self._origin = _open(self._client), location.origin
        return self._store


def _open(client: Client) -> S3Store:
    access, location = client.access, client.location
    options: ClientConfig = {
        "allow_http": location.scheme == "http",
        "connect_timeout": timedelta(seconds=access.timeout_s),
        "read_timeout": timedelta(seconds=access.timeout_s),
        "timeout": timedelta(seconds=max(10 * access.timeout_s, 300)),
        "user_agent": "hsfs",
    }
    if access.ca_bundle:
        options["root_certificate"] = Path(access.ca_bundle).read_bytes()
    path_style = location.root != "/"
    endpoint = location.origin
    if path_style:
        # The root is the quoted bucket, behind a path of the endpoint's own if it has one.
        endpoint += location.root[:-1].rpartition("/")[0]
    return S3Store(
        access.bucket,
        endpoint=endpoint,
        region=client.region,
        virtual_hosted_style_request=not path_style,
        skip_signature=access.chain is None,
        credential_provider=None if access.chain is None else _provider(client),
        client_options=options,
        retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=access.timeout_s)},
    )


def _provider(client: Client) -> Callable[[], S3Credential]:
    def credentials() -> S3Credential:
        chain = client.access.chain
        if chain is None:
            raise ValueError("unsigned")
        who = chain.credentials()
        found: S3Credential = {
            "access_key_id": who.access_key,
            "secret_access_key": who.secret_key,
            "expires_at": datetime.now(UTC) + _KEPT,
        }
        if who.token:
            found["token"] = who.token
        return found

    return credentials
