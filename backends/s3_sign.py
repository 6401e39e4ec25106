"""AWS Signature Version 4 for requests without a body, at the price of two hashes.

The signing key is the same for a day, date strings for a second. Signed are the host, the date, the
hash of the empty body and the session token; other headers need no signature, because a changed
range or condition shows in the answer, which is checked. Protocol: "Authenticating Requests: Using
the Authorization Header" of the S3 API reference. Paths are signed as they are sent (S3 neither
normalises nor encodes twice).
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

_EMPTY_SHA256: Final = sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a request is signed with. `repr` shows no secret."""

    access_key: str
    secret_key: str
    token: str = ""

    def __repr__(self) -> str:
        return "Credentials(...)"


class Signer:
    """Signs for one region and service; `skew_s` is what the server's clock is ahead of ours."""

    def __init__(
        self, region: str, *, service: str = "s3", clock: Callable[[], float] = time.time
    ) -> None:
        self.region = region
        self.skew_s = 0.0
        self._service = service
        self._clock = clock
        self._stamp: tuple[int, str, str] = (0, "", "")
        self._key: tuple[tuple[str, str, str], bytes] | None = None

    def headers(self, method: str, host: str, path: str, query: str, who: Credentials) -> str:
        """The header lines that authenticate a request, each ended by CRLF.

        `path` percent-encoded; `query` percent-encoded and sorted by name.
        """
        stamp, scope = self._now()
        token_line = f"x-amz-security-token:{who.token}\n" if who.token else ""
        signed = "host;x-amz-content-sha256;x-amz-date" + (
            ";x-amz-security-token" if who.token else ""
        )
        canonical = (
            f"{method}\n{path}\n{query}\nhost:{host}\nx-amz-content-sha256:{_EMPTY_SHA256}\n"
            f"x-amz-date:{stamp}\n{token_line}\n{signed}\n{_EMPTY_SHA256}"
        )
        digest = sha256(canonical.encode()).hexdigest()
        text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{digest}"
        signature = hmac.digest(self._signing_key(who, stamp[:8]), text.encode(), "sha256").hex()
        token = f"x-amz-security-token: {who.token}\r\n" if who.token else ""
        return (
            f"x-amz-date: {stamp}\r\nx-amz-content-sha256: {_EMPTY_SHA256}\r\n{token}"
            f"Authorization: AWS4-HMAC-SHA256 Credential={who.access_key}/{scope}, "
            f"SignedHeaders={signed}, Signature={signature}\r\n"
        )

    def _now(self) -> tuple[str, str]:
        second = int(self._clock() + self.skew_s)
        known, stamp, scope = self._stamp
        if known != second or f"/{self.region}/" not in scope:
            stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(second))
            scope = f"{stamp[:8]}/{self.region}/{self._service}/aws4_request"
            self._stamp = (second, stamp, scope)  # one tuple: threads see it whole
        return stamp, scope

    def _signing_key(self, who: Credentials, day: str) -> bytes:
        name = (who.secret_key, day, self.region)
        cached = self._key
        if cached is not None and cached[0] == name:
            return cached[1]
        key = f"AWS4{who.secret_key}".encode()
        for part in (day, self.region, self._service, "aws4_request"):
            key = hmac.digest(key, part.encode(), "sha256")
        self._key = (name, key)
        return key
