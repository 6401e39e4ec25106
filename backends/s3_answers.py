"""What an S3 server's answer means: errors as leaves of HsfsError, dates, ranges."""

from __future__ import annotations

import calendar
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_tz
from typing import Final

from hsfs.core.errors import (
    HsfsError,
    NotFound,
    NotSupported,
    ProtocolError,
    StaleVersion,
    Throttled,
    Unauthorised,
    Unavailable,
)

ERROR_BODY_MAX: Final = 64 * 1024
_CODE: Final = re.compile(rb"<Code>\s*([\w.]{1,80})\s*</Code>")
_REGION: Final = re.compile(rb"<Region>\s*([\w-]{1,40})\s*</Region>")
_RANGE: Final = re.compile(rb"bytes (\d+)-(\d+)/(\d+|\*)")

_EXPIRED: Final = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"})
# Of keys that were never good, or were changed at the server; InvalidToken also when a token ended.
_REFUSED_KEYS: Final = frozenset(
    {"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "InvalidClientTokenId"}
)
_SLOW: Final = frozenset(
    {
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
        "RequestLimitExceeded",
        "ServiceUnavailable",
        "BandwidthLimitExceeded",
    }
)
_BUSY: Final = frozenset({"InternalError", "RequestTimeout", "OperationAborted"})
_SKEWED: Final = frozenset({"RequestTimeTooSkewed", "RequestExpired"})


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer that is an error. `code` is S3's own ("" where the body has none); `region` is
    where the server says the bucket lives; `skew_s` the server's clock less ours."""

    status: int
    code: str
    region: str
    retry_after_s: float
    skew_s: float

    @property
    def expired(self) -> bool:
        """The credentials were good once."""
        return self.code in _EXPIRED

    @property
    def refuses_keys(self) -> bool:
        """The server does not know the credentials (any more), whatever they may do."""
        return self.expired or self.code in _REFUSED_KEYS

    @property
    def skewed(self) -> bool:
        """Our clock is too far off the server's."""
        return self.code in _SKEWED or (
            # HEAD has no body; a signature that is 15 minutes off is refused for that.
            self.status == 403 and not self.code and abs(self.skew_s) > 600
        )

    def error(self, what: str, *, bucket: str, pinned: bool) -> HsfsError:
        """The leaf that says what can be done. `pinned`: a version had been asked for."""
        status, code = self.status, self.code
        why = f"{status} {code}".strip()
        if code == "NoSuchBucket":
            return NotFound(f"bucket {bucket}", "does not exist", "check the URL's bucket name")
        if status == 404:
            return StaleVersion(what, "gone from its bucket") if pinned else NotFound(what, why)
        if status == 412:
            return StaleVersion(what, "changed in its bucket")
        asked = code not in _BUSY or self.retry_after_s > 0
        if status == 429 or code in _SLOW or (status == 503 and asked):
            return Throttled(what, why, retry_after_s=self.retry_after_s)
        if self.skewed:
            return Unauthorised(
                what,
                f"{why}: the server's clock is {abs(self.skew_s):.0f} s "
                f"{'ahead of' if self.skew_s > 0 else 'behind'} this machine's",
                "set the clock",
            )
        if self.expired:
            return Unauthorised(what, f"{why}: the credentials have expired", "log in again")
        if status in (401, 403) or code in ("AccessDenied", "InvalidAccessKeyId"):
            return Unauthorised(what, why, _NEXT_STEPS.get(code, _NEXT_STEPS[""]))
        if status in (301, 307, 308) or code == "AuthorizationHeaderMalformed":
            where = f"; it says {self.region}" if self.region else ""
            return Unauthorised(what, f"{why}: wrong region or endpoint{where}", "set region")
        if status == 501 or code == "NotImplemented":
            return NotSupported(what, why)
        if status >= 500 or code in _BUSY:
            return Unavailable(what, why)
        return ProtocolError(what, f"unexpected answer {why}")


_NEXT_STEPS: Final[Mapping[str, str]] = {
    "": "check that these credentials may list and read the bucket",
    "InvalidAccessKeyId": "check AWS_ACCESS_KEY_ID or the profile",
    "SignatureDoesNotMatch": "check AWS_SECRET_ACCESS_KEY or the profile",
}


def refusal(status: int, fields: Mapping[bytes, bytes], body: bytes) -> Refusal:
    """Read an error answer; any body will do."""
    code = _CODE.search(body) if body else None
    region = fields.get(b"x-amz-bucket-region", b"")
    if not region and body and (found := _REGION.search(body)):
        region = found[1]
    try:
        retry_after_s = float(fields.get(b"retry-after", b"0"))
    except ValueError:  # the form with a date: rare enough to pick our own pause
        retry_after_s = 0.0
    server_time = http_time(fields.get(b"date", b""))
    return Refusal(
        status=status,
        code=code[1].decode("ascii") if code else "",
        region=region.decode("ascii", "replace"),
        retry_after_s=retry_after_s if 0.0 <= retry_after_s < 1e6 else 0.0,
        skew_s=server_time - time.time() if server_time else 0.0,
    )


def http_time(value: bytes) -> int:
    """Seconds since the epoch of an HTTP date, 0 where it is none."""
    parsed = parsedate_tz(value.decode("ascii", "replace")) if value else None
    if parsed is None:
        return 0
    try:
        return calendar.timegm((*parsed[:6], 0, 0, 0)) - (parsed[9] or 0)
    except (ValueError, OverflowError):
        return 0


def content_range(value: bytes) -> tuple[int, int, int] | None:
    """(start, end, total) of a Content-Range, half-open, total -1 if unknown; None = malformed."""
    found = _RANGE.fullmatch(value.strip())
    if found is None:
        return None
    start, last = int(found[1]), int(found[2])
    total = -1 if found[3] == b"*" else int(found[3])
    if last < start or (total >= 0 and last >= total):
        return None
    return start, last + 1, total
