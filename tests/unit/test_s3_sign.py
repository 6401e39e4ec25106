"""Our signatures are botocore's."""

import re

import botocore.auth
import botocore.awsrequest
import botocore.credentials
from hypothesis import given
from hypothesis import strategies as st

from hsfs.backends.s3_keys import quoted, quoted_value
from hsfs.backends.s3_sign import Credentials, Signer

_WORD = st.text("abcXYZ0189-", min_size=1, max_size=12)


def botocores(method, host, path, query, stamp, region, who):
    request = botocore.awsrequest.AWSRequest(method, f"http://{host}{path}?{query}")
    request.headers["x-amz-date"] = stamp
    request.headers["x-amz-content-sha256"] = _EMPTY
    if who.token:
        request.headers["x-amz-security-token"] = who.token
    request.context["timestamp"] = stamp
    credentials = botocore.credentials.Credentials(who.access_key, who.secret_key, who.token)
    auth = botocore.auth.S3SigV4Auth(credentials, "s3", region)
    canonical = auth.canonical_request(request)
    return auth.signature(auth.string_to_sign(request, canonical), request)


_EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@given(
    method=st.sampled_from(["GET", "HEAD"]),
    key=st.binary(max_size=30),
    prefix=st.binary(max_size=20),
    second=st.integers(0, 4_000_000_000),
    region=_WORD,
    secret=st.text(min_size=1, max_size=40),
    token=st.one_of(st.just(""), _WORD),
    port=st.integers(1, 65535),
)
def test_against_botocore(method, key, prefix, second, region, secret, token, port):
    signer = Signer(region, clock=lambda: second + 0.5)
    who = Credentials("AKID", secret, token)
    host = f"bucket.example.com:{port}"
    path = "/" + quoted(key)
    query = f"delimiter=%2F&list-type=2&prefix={quoted_value(prefix)}"
    port_is_standard = port in (80, 443)
    if port_is_standard:  # botocore leaves a standard port out of the Host header
        host = "bucket.example.com"
    for _ in range(2):  # the second time from what is kept
        lines = signer.headers(method, host, path, query, who)
        fields = dict(line.split(": ", 1) for line in lines.split("\r\n") if line)
        found = re.search(r"Signature=([0-9a-f]{64})", fields["Authorization"])
        stamp = fields["x-amz-date"]
        assert found is not None
        assert found[1] == botocores(method, host, path, query, stamp, region, who)
        assert f"/{region}/s3/aws4_request" in fields["Authorization"]


def test_the_kept_key_follows_the_day_the_region_and_the_credentials():
    now = [1_700_000_000.0]
    signer = Signer("eu-1", clock=lambda: now[0])
    seen = set()
    for region in ("eu-1", "us-1"):
        for secret in ("one", "two"):
            for day in range(2):
                now[0] = 1_700_000_000.0 + 86400 * day
                signer.region = region
                who = Credentials("AKID", secret)
                lines = signer.headers("GET", "h", "/", "", who)
                fresh = Signer(region, clock=lambda: now[0]).headers("GET", "h", "/", "", who)
                assert lines == fresh
                seen.add(lines)
    assert len(seen) == 8


def test_a_skew_moves_the_date():
    signer = Signer("r", clock=lambda: 0.0)
    signer.skew_s = 3600.0
    assert "x-amz-date: 19700101T010000Z" in signer.headers(
        "GET", "h", "/", "", Credentials("a", "b")
    )


def test_credentials_show_no_secret():
    who = Credentials("AKIDX", "secretX", "tokenX")
    assert "X" not in repr(who)
    assert "X" not in f"{who}"
