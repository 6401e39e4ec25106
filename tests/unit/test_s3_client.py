"""What is mended on the way, and what refusals become; with scripted servers."""

import os
import time

import pytest

from hsfs.backends.s3_answers import content_range, http_time, refusal
from hsfs.backends.s3_client import Access, Client, locate
from hsfs.backends.s3_credentials import Chain
from hsfs.backends.s3_sign import Credentials
from hsfs.core.errors import (
    ConfigError,
    NotFound,
    NotSupported,
    ProtocolError,
    StaleVersion,
    Throttled,
    Unauthorised,
    Unavailable,
)
from hsfs.core.interruption import Interruption
from tests.servers.scripted_peer import Peer

OK = b'HTTP/1.1 200 OK\r\nContent-Length: 2\r\nETag: "x"\r\n\r\nok'


class Keys:
    """A credential chain that knows a second key."""

    def __init__(self, token="t1"):
        self.now = Credentials("AKID1", "SECRET1", token)
        self.renewed = 0

    def credentials(self):
        return self.now

    def renew(self, refused):
        self.renewed += 1
        self.now = Credentials("AKID2", "SECRET2", "t2")
        return True


def answer(status, code="", *, region="", date="", more=""):
    body = f"<Error><Code>{code}</Code>{region and f'<Region>{region}</Region>'}</Error>"
    return (
        f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\n{date and f'Date: {date}{chr(13)}'}"
        f"{date and chr(10)}{more}\r\n{body}"
    ).encode()


def ask(peer, chain, method="GET"):
    access = Access("b", f"http://127.0.0.1:{peer.port}", "r1", None, "", 20.0, chain)
    client = Client(access, links=2)
    try:
        with client.ask(method, b"k", "", "", Interruption()) as reply:
            return reply.status
    finally:
        client.close()


def test_expired_credentials_are_renewed_once():
    keys = Keys()
    with Peer([[answer(400, "ExpiredToken")], [OK]]) as peer:
        assert ask(peer, keys) == 200
        assert [b"AKID1" in peer.asked[0], b"AKID2" in peer.asked[1]] == [True, True]
    assert keys.renewed == 1
    keys = Keys()
    with Peer([[answer(400, "ExpiredToken")], [answer(400, "ExpiredToken")]]) as peer:
        with pytest.raises(Unauthorised, match="expired") as refused:
            ask(peer, keys)
        assert "SECRET" not in repr(refused.value)


def test_head_tells_no_reason_so_temporary_credentials_are_renewed():
    keys = Keys()
    refused = b"HTTP/1.1 403 X\r\nContent-Length: 0\r\n\r\n"
    with Peer([[refused], [OK.replace(b"\r\n\r\nok", b"\r\n\r\n")]]) as peer:
        assert ask(peer, keys, "HEAD") == 200
    assert keys.renewed == 1
    with Peer([[refused]]) as peer, pytest.raises(Unauthorised):
        ask(peer, Keys(token=""), "HEAD")


def test_a_skewed_clock_is_corrected_or_explained():
    ahead = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 7200))
    skewed = answer(403, "RequestTimeTooSkewed", date=ahead)
    with Peer([[skewed], [OK]]) as peer:
        assert ask(peer, Keys()) == 200
        dates = [
            line.split(b": ")[1]
            for asked in peer.asked
            for line in asked.split(b"\r\n")
            if line.startswith(b"x-amz-date")
        ]
        assert dates[0] != dates[1]
    explained = pytest.raises(Unauthorised, match=r"7[12]\d\d s ahead")
    with Peer([[skewed], [skewed]]) as peer, explained:
        ask(peer, Keys())


def test_the_region_is_learned():
    with Peer([[answer(400, "AuthorizationHeaderMalformed", region="eu-9")], [OK]]) as peer:
        assert ask(peer, Keys()) == 200
        assert b"/eu-9/s3/" in peer.asked[1]


@pytest.mark.parametrize(
    ("status", "code", "leaf"),
    [
        (404, "NoSuchKey", NotFound),
        (404, "NoSuchBucket", NotFound),
        (404, "", NotFound),
        (403, "AccessDenied", Unauthorised),
        (403, "SignatureDoesNotMatch", Unauthorised),
        (401, "", Unauthorised),
        (301, "PermanentRedirect", Unauthorised),
        (500, "InternalError", Unavailable),
        (502, "", Unavailable),
        (503, "SlowDown", Throttled),
        (503, "", Throttled),
        (429, "", Throttled),
        (400, "SlowDown", Throttled),
        (400, "RequestTimeout", Unavailable),
        (412, "PreconditionFailed", StaleVersion),
        (400, "InvalidArgument", ProtocolError),
        (501, "NotImplemented", NotSupported),
    ],
)
def test_leaves(status, code, leaf):
    found = refusal(status, {}, f"<Error><Code>{code}</Code></Error>".encode())
    error = found.error("it", bucket="b", pinned=False)
    assert isinstance(error, leaf)
    pinned = found.error("it", bucket="b", pinned=True)
    assert isinstance(
        pinned, StaleVersion if (status, code)[0] == 404 and "Bucket" not in code else leaf
    )


def test_retry_after():
    for value, seconds in (
        (b"7", 7.0),
        (b"0.5", 0.5),
        (b"-1", 0.0),
        (b"Mon, x", 0.0),
        (b"inf", 0.0),
    ):
        error = refusal(503, {b"retry-after": value}, b"").error("it", bucket="b", pinned=False)
        assert isinstance(error, Throttled)
        assert error.retry_after_s == seconds


def test_dates_and_ranges():
    assert http_time(b"Mon, 30 Nov 2026 14:15:48 GMT") == 1_796_048_148
    for bad in (b"", b"soon", b"\xff"):
        assert http_time(bad) == 0
    assert content_range(b"bytes 0-9/100") == (0, 10, 100)
    assert content_range(b"bytes 5-9/*") == (5, 10, -1)
    for bad in (b"", b"bytes */5", b"bytes 9-0/100", b"bytes 0-9/9", b"bytes 0-x/9", b"0-9/10"):
        assert content_range(bad) is None


def test_locations():
    def at(bucket, endpoint, **options):
        found = locate(bucket, endpoint, "eu-1", path_style=options.get("path_style"))
        return found.scheme, found.address, found.port, found.host, found.root

    aws = "s3.eu-1.amazonaws.com"
    assert at("b", "") == ("https", f"b.{aws}", 443, f"b.{aws}", "/")
    assert at("b.c", "") == ("https", aws, 443, aws, "/b.c/")
    assert at("b", "", path_style=True) == ("https", aws, 443, aws, "/b/")
    assert at("b", "http://h:9000") == ("http", "h", 9000, "h:9000", "/b/")
    assert at("b", "http://h:80/x y/") == ("http", "h", 80, "h", "/x%20y/b/")
    assert at("b", "http://[::1]:9000") == ("http", "::1", 9000, "[::1]:9000", "/b/")
    assert at("b", "https://h", path_style=False) == ("https", "b.h", 443, "b.h", "/")
    for bad in ("h:9000", "ftp://h", "http://", "http://h:99999", "http://u:p@h"):
        with pytest.raises(ConfigError):
            at("b", bad)


def test_refused_keys_are_asked_for_again():
    for code in ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken"):
        keys = Keys(token="")
        with Peer([[answer(403, code)], [OK]]) as peer:
            assert ask(peer, keys) == 200
        assert keys.renewed == 1
    keys = Keys(token="")
    with Peer([[answer(403, "AccessDenied")]]) as peer, pytest.raises(Unauthorised):
        ask(peer, keys)
    assert keys.renewed == 0


def test_a_chain_reads_its_files_again(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    file = tmp_path / "credentials"

    def write(secret):
        file.write_text(f"[p]\naws_access_key_id = A\naws_secret_access_key = {secret}\n")

    write("old")
    chain = Chain("p", str(file))
    old = chain.credentials()
    assert not chain.renew(old)
    write("new")
    assert not chain.renew(old)  # just asked in vain
    monkeypatch.setattr("hsfs.backends.s3_credentials._RENEW_S", 0.0)
    assert chain.renew(old)
    assert chain.credentials() == Credentials("A", "new", "")
    assert chain.renew(old)  # another thread's complaint of what is gone already
