"""Reads over TLS by obstore: decryption and copies in Rust, without the GIL.

It declines (None) whatever it can't deliver at once, instead of raising: its errors say too little
to act on, and the wire asks again. A declined read costs one round trip, and comes with trouble.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import obstore
import obstore.exceptions
from obstore.store import ClientConfig, S3Credential, S3Store

from hsfs.backends.s3_client import Client
from hsfs.backends.s3_keys import version_of
from hsfs.backends.s3_read import Chunk
from hsfs.core.errors import Interrupted
from hsfs.core.ports import Interrupt
from hsfs.core.types import Version

_PIECE: Final = 1 << 20
_KEPT: Final = timedelta(seconds=60)  # the chain behind keeps and refreshes by itself


class ObstorePath:
    """FastPath of s3_read by obstore."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._origin = ""
        self._store: S3Store | None = None

    def get(
        self, key: bytes, offset: int, view: memoryview, pin: Version | None, interrupt: Interrupt
    ) -> Chunk | None:
        wanted = len(view)
        store = self._current()
        try:
            options: obstore.GetOptions = {"range": (offset, offset + wanted)}
            if pin is not None:
                options["if_match"] = f'"{pin.decode("latin-1")}"'
            result = obstore.get(store, key.decode(), options=options)
            meta = result.meta
            start, end = result.range
            etag = meta.get("e_tag")
            if etag is None or start != offset or end > offset + wanted:
                return None
            version = version_of(etag.encode("latin-1"))
            if pin is not None and version != pin:
                return None
            size, done = end - start, 0
            if size <= _PIECE:
                body = result.bytes()
                done = len(body)
                if done == size:
                    view[:done] = memoryview(body)
            else:
                for piece in result.stream(_PIECE):
                    if interrupt.interrupted:
                        raise Interrupted(self._client.name)
                    here = memoryview(piece)
                    if done + len(here) > size:
                        return None
                    view[done : done + len(here)] = here
                    done += len(here)
        except (obstore.exceptions.BaseError, OSError, ValueError):
            return None
        if done != size:
            return None
        total = meta["size"]
        # Whether the bucket encrypts with KMS (then the ETag is no MD5) is in a header that
        # obstore does not show, and TLS already guards the way: no MD5 here.
        return Chunk(size, version, total, checkable=False)

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
