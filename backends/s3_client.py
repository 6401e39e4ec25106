"""One bucket as an HTTP service: where it is, who asks, and the one place that tries again.

`Client.ask` sends one signed request and gives the unread answer of a success. What can be repaired
is repaired on the way, each at most once per request: refused credentials are renewed, a skewed
clock is corrected in the signature, a bucket in another region is asked there. Everything that only
needs patience (a cut connection, 5xx, throttling) is decided by `Patience`, which an operation
carries through its attempts: pauses with jitter, never beyond the time limit without progress.
"""

from __future__ import annotations

import ipaddress
import random
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote_to_bytes, urlsplit

from hsfs.backends.http_wire import Reply, Wire
from hsfs.backends.s3_answers import ERROR_BODY_MAX, Refusal, refusal
from hsfs.backends.s3_credentials import Chain
from hsfs.backends.s3_keys import quoted
from hsfs.backends.s3_sign import Credentials, Signer
from hsfs.core.errors import (
    ConfigError,
    Corrupt,
    HsfsError,
    Interrupted,
    Throttled,
    TimedOut,
    Unauthorised,
    Unavailable,
)
from hsfs.core.ports import Interrupt

_ATTEMPTS: Final = 6
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0
_AGENT: Final = "hsfs"
_OK: Final = frozenset({200, 204, 206, 416})


class Patience:
    """The budget of one operation: time without progress, and attempts in a row."""

    __slots__ = (
        "_attempts",
        "_closed",
        "_corrupt",
        "_deadline",
        "_interrupt",
        "_most",
        "_timeout_s",
    )

    def __init__(
        self, timeout_s: float, interrupt: Interrupt, closed: Callable[[], bool], most: int
    ) -> None:
        self._most = most
        self._timeout_s = timeout_s
        self._closed = closed
        self._deadline = time.monotonic() + timeout_s
        self._interrupt = interrupt
        self._attempts = 0
        self._corrupt = False

    def progress(self) -> None:
        """Bytes or a page arrived: the clock starts anew."""
        self._deadline = time.monotonic() + self._timeout_s
        self._attempts = 0

    @property
    def left_s(self) -> float | None:
        """Seconds until the time limit; None while (nearly) the whole of it is left."""
        left_s = self._deadline - time.monotonic()
        return None if left_s > 0.9 * self._timeout_s else max(left_s, 0.05)

    def pause(self, error: HsfsError) -> None:
        """Wait before the next attempt, or raise `error` where another makes no sense."""
        self._attempts += 1
        if isinstance(error, Corrupt):
            if self._corrupt:
                raise error
            self._corrupt = True
            return
        if isinstance(error, TimedOut) or not isinstance(error, Unavailable) or self._closed():
            raise error
        longest = min(_FIRST_PAUSE_S * 2**self._attempts, _LONGEST_PAUSE_S)
        pause_s = random.uniform(longest / 2, longest)
        if isinstance(error, Throttled):
            # The server's own wish goes beyond our schedule, and it may repeat it.
            pause_s = max(error.retry_after_s * random.uniform(1.0, 1.1), pause_s)
        elif self._attempts >= self._most:
            raise error
        if time.monotonic() + pause_s >= self._deadline:
            raise error
        woken = threading.Event()
        self._interrupt.attach(woken.set)
        try:
            woken.wait(pause_s)
        finally:
            self._interrupt.detach()
        if self._interrupt.interrupted:
            raise Interrupted(error.what)


@dataclass(frozen=True, slots=True)
class Location:
    """Where a bucket answers. `host` is the Host header; `root` the path before a key."""

    scheme: str
    address: str
    port: int
    host: str
    root: str  # "/bucket/" or "/", percent-encoded

    @property
    def origin(self) -> str:
        """scheme://host, for messages and other clients."""
        return f"{self.scheme}://{self.host}"


def locate(bucket: str, endpoint: str, region: str, *, path_style: bool | None) -> Location:
    """The location of a bucket; without an endpoint it is at AWS. Raises ConfigError."""
    amazon = not endpoint or "amazonaws.com" in endpoint
    url = urlsplit(endpoint or f"https://s3.{region}.amazonaws.com")
    try:
        port = url.port
    except ValueError:
        raise ConfigError(f"endpoint {endpoint}", "bad port") from None
    if url.scheme not in ("http", "https") or not url.hostname or url.query or url.username:
        raise ConfigError(f"endpoint {endpoint}", "not an http(s)://HOST[:PORT] URL")
    if path_style is None:
        # A bucket with dots does not match the certificate of *.s3.amazonaws.com.
        path_style = not amazon or "." in bucket
    name = url.hostname
    if not path_style and not _is_address(name):
        name = f"{bucket}.{name}"
        root = ""
    else:
        root = "/" + quoted(bucket.encode())
    standard = 443 if url.scheme == "https" else 80
    host = f"[{name}]" if ":" in name else name
    return Location(
        scheme=url.scheme,
        address=name,
        port=port or standard,
        host=host if port in (None, standard) else f"{host}:{port}",
        root=quoted(unquote_to_bytes(url.path.rstrip("/"))) + root + "/",
    )


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach a bucket, as configured. `chain` None = unsigned requests."""

    bucket: str
    endpoint: str
    region: str
    path_style: bool | None
    ca_bundle: str
    timeout_s: float
    chain: Chain | None


class Client:
    """Signed requests to one bucket. All methods block and are safe in many threads."""

    def __init__(self, access: Access, *, links: int) -> None:
        self.access = access
        self.location = locate(
            access.bucket, access.endpoint, access.region, path_style=access.path_style
        )
        self.server = b""  # its Server header, once it has answered
        self._links = links
        self._signer = Signer(access.region)
        self._tls = _tls_context(access.ca_bundle) if self.location.scheme == "https" else None
        self._wire = self._open_wire()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def region(self) -> str:
        """The region that requests are signed for; learned from the server where it says so."""
        return self._signer.region

    @property
    def name(self) -> str:
        """For messages: the bucket and where it is."""
        return f"s3://{self.access.bucket} at {self.location.origin}"

    def patience(self, interrupt: Interrupt, attempts: int = _ATTEMPTS) -> Patience:
        """The budget of a new operation; after so many attempts in a row it gives up."""
        return Patience(self.access.timeout_s, interrupt, lambda: self._closed, attempts)

    def ask(
        self,
        method: str,
        key: bytes,
        query: str,
        extra: str,
        interrupt: Interrupt,
        *,
        pinned: bool = False,
        timeout_s: float | None = None,
    ) -> Reply:
        """Send one request; the answer is a success (2xx), or 416, which has no body to speak of.

        `key` of the object, b"" for the bucket; `query` as SigV4 wants it (sorted, encoded);
        `extra` header lines, each ended by CRLF. Raises leaves of HsfsError.
        """
        repaired: set[str] = set()
        chain = self.access.chain
        while True:
            location, signer = self.location, self._signer
            path = location.root + quoted(key)
            who = chain.credentials() if chain is not None else None
            signed = "" if who is None else signer.headers(method, location.host, path, query, who)
            target = f"{path}?{query}" if query else path
            head = (
                f"{method} {target} HTTP/1.1\r\nHost: {location.host}\r\nUser-Agent: {_AGENT}\r\n"
                f"Accept: */*\r\n{extra}{signed}\r\n"
            )
            reply = self._wire.exchange(
                head.encode("ascii"), interrupt, bodiless=method == "HEAD", timeout_s=timeout_s
            )
            if reply.status in _OK:
                return reply
            refused = self._refusal(reply)
            if self._repair(refused, who, repaired):
                continue
            raise refused.error(self._what(key), bucket=self.access.bucket, pinned=pinned)

    def refuse(self, reply: Reply, key: bytes, start: bytes) -> HsfsError:
        """The error of an answer with a good status whose body is no data: some servers and
        proxies send an error document with 200. `start` is what was read of it."""
        with reply:
            rest = reply.read_all(ERROR_BODY_MAX)
        found = refusal(500, reply.fields, start + rest)
        return found.error(self._what(key), bucket=self.access.bucket, pinned=False)

    def close(self) -> None:
        """Close all links; requests in flight end with Unavailable."""
        self._closed = True
        self._wire.close()

    def _what(self, key: bytes) -> str:
        # Keys are user data: errors name the bucket, the layers above name the file.
        return f"object in s3://{self.access.bucket}" if key else self.name

    def _refusal(self, reply: Reply) -> Refusal:
        try:
            body = reply.read_all(ERROR_BODY_MAX)
        finally:
            reply.close()
        return refusal(reply.status, reply.fields, body)

    def _repair(self, refused: Refusal, who: Credentials | None, repaired: set[str]) -> bool:
        """Mend what the refusal complains of; true = ask again at once."""
        if refused.region and refused.region != self._signer.region and "region" not in repaired:
            repaired.add("region")
            if not self.access.endpoint or refused.status in (400, 403):
                self._move(refused.region)
                return True
        if refused.skewed and "skew" not in repaired and abs(refused.skew_s) > 1:
            repaired.add("skew")
            self._signer.skew_s = refused.skew_s
            return True
        chain = self.access.chain
        # HEAD has no body that could say ExpiredToken: a 400 or 403 of temporary credentials may
        # be that.
        maybe = bool(who is not None and who.token and not refused.code and refused.status < 404)
        if who is not None and chain is not None and (refused.refuses_keys or maybe):
            if "expired" in repaired:
                return False
            repaired.add("expired")
            try:
                return chain.renew(who)
            except Unauthorised:
                return False
        return False

    def _move(self, region: str) -> None:
        with self._lock:
            skew_s = self._signer.skew_s
            self._signer = Signer(region)
            self._signer.skew_s = skew_s
            if self.access.endpoint:
                return
            self.location = locate(
                self.access.bucket, "", region, path_style=self.access.path_style
            )
            before, self._wire = self._wire, self._open_wire()
        # In flight on the old one are requests to the wrong region only.
        before.close()

    def _open_wire(self) -> Wire:
        return Wire(
            self.location.address,
            self.location.port,
            tls=self._tls,
            timeout_s=self.access.timeout_s,
            name=self.name,
            keep=self._links,
        )


def _tls_context(ca_bundle: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_bundle or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"ca_bundle {ca_bundle}", str(error)) from error
