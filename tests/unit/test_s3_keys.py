"""What obstore may be asked for, and how keys and versions are written."""

import http.server
import threading
from urllib.parse import unquote_to_bytes

import obstore
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from obstore.store import S3Store

from hsfs.backends.s3_keys import is_canonical, is_md5, quoted, version_of


class _Echo(http.server.BaseHTTPRequestHandler):
    """Remembers the path that was asked for."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.server.asked.append(self.path)
        self.send_response(200)
        for name, value in (
            ("Content-Length", "0"),
            ("ETag", '"x"'),
            ("Last-Modified", "Mon, 30 Nov 2026 00:00:00 GMT"),
        ):
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def echo():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Echo) as server:
        server.daemon_threads = True
        server.asked = []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        server.store = S3Store(
            "bucket",
            endpoint=f"http://127.0.0.1:{server.server_port}",
            region="r",
            skip_signature=True,
            virtual_hosted_style_request=False,
            client_options={"allow_http": True},
            retry_config={"max_retries": 0},
        )
        yield server
        server.shutdown()
        thread.join()


_SEGMENT = st.text(
    st.one_of(st.sampled_from("a.%~+ &=?#\\*\"'<>|{}[]^`;:@!$,"), st.characters(codec="utf-8")),
    max_size=6,
)


@given(st.lists(_SEGMENT, min_size=1, max_size=4).map("/".join))
@example("a%2Fb")
@example("a b+c")
@example("...")
@example("\u00a0")
def test_obstore_asks_for_exactly_a_canonical_key(echo, text):
    key = text.encode()
    if not is_canonical(key):
        return
    echo.asked.clear()
    obstore.get(echo.store, text).bytes()
    assert [unquote_to_bytes(path) for path in echo.asked] == [b"/bucket/" + key]


@pytest.mark.parametrize(
    "key",
    [
        *(b"", b"/", b"//", b"/a", b"a/", b"a//b", b".", b"..", b"./a", b"a/.", b"a/./b"),
        *(b"a/../b", b"../a", b"a\x00b", b"a\nb", b"\x1f", b"a\x7f", b"\xff", b"a/\xc3"),
    ],
)
def test_odd_keys_are_not_canonical(key):
    assert not is_canonical(key)


@pytest.mark.parametrize("key", [b"a", b"a/b", b"...", b".a", b"a.", b"a/..b/c", b" ", b"a%2F/b+"])
def test_plain_keys_are(key):
    assert is_canonical(key)


@given(st.binary(max_size=40))
def test_quoting_keeps_every_byte(key):
    assert unquote_to_bytes(quoted(key)) == key
    assert set(quoted(key)) <= set(
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~/%"
    )


@pytest.mark.parametrize(
    "etag",
    [b'"abc-1"', b"abc-1", b'W/"abc-1"', b"&quot;abc-1&quot;", b"&#34;abc-1&#34;", b' "abc-1" '],
)
def test_one_version_however_it_is_written(etag):
    assert version_of(etag) == b"abc-1"


def test_what_looks_like_an_md5():
    assert is_md5(b"0" * 32)
    assert not is_md5(b"0" * 32 + b"-2")
    assert not is_md5(b"0" * 31 + b"g")
    assert not is_md5(b"")
