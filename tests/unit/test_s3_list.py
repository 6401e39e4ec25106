"""Pages of ListObjectsV2: golden ones of several servers, and garbage."""

import contextlib
from urllib.parse import quote_plus
from xml.sax.saxutils import escape

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsfs.backends import s3_list
from hsfs.backends.s3_list import Listed, parse_page
from hsfs.core.errors import ProtocolError

_NS = b'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
_T = 1_796_048_148 * 10**9  # 2026-11-30T14:15:48Z

AWS = (
    b'<?xml version="1.0" encoding="UTF-8"?>\n' + _NS + b"<Name>b</Name><Prefix></Prefix>"
    b"<NextContinuationToken>1ueGcx&amp;PTr/8=</NextContinuationToken><KeyCount>3</KeyCount>"
    b"<MaxKeys>2</MaxKeys><Delimiter>%2F</Delimiter><EncodingType>url</EncodingType>"
    b"<IsTruncated>true</IsTruncated>"
    b"<Contents><Key>a+b%2Bc%25</Key><LastModified>2026-11-30T14:15:48.000Z</LastModified>"
    b"<ETag>&quot;0123-2&quot;</ETag><ChecksumAlgorithm>CRC64NVME</ChecksumAlgorithm>"
    b"<ChecksumType>FULL_OBJECT</ChecksumType><Size>5</Size><StorageClass>STANDARD</StorageClass>"
    b"</Contents><CommonPrefixes><Prefix>d+d/</Prefix></CommonPrefixes>"
    b"<CommonPrefixes><Prefix>e%0A//</Prefix></CommonPrefixes></ListBucketResult>"
)
SEAWEEDFS = (
    b'<?xml version="1.0" encoding="UTF-8"?>\n' + _NS + b"<Name>b</Name><Prefix></Prefix>"
    b"<MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>"
    b"<Contents><Key>sp%20ace/x+y</Key><ETag>&#34;ab&#34;</ETag><Size>0</Size>"
    b"<StorageClass>STANDARD</StorageClass><LastModified>2026-11-30T14:15:48Z</LastModified>"
    b"</Contents><EncodingType>url</EncodingType><KeyCount>1</KeyCount></ListBucketResult>"
)
PRETTY = (
    b'<?xml version="1.0" encoding="UTF-8"?>\n' + _NS + b"\n  <Name>b</Name>\n"
    b"  <IsTruncated>false</IsTruncated>\n  <Prefix></Prefix>\n  <Contents>\n    <Key>a%26</Key>\n"
    b"    <LastModified>2026-11-30T14:15:48.68Z</LastModified>\n    <ETag>ab</ETag>\n"
    b"    <Size>7</Size>\n    <Owner>\n <ID>x</ID><DisplayName/>\n</Owner>\n"
    b"    <StorageClass>STANDARD</StorageClass>\n  </Contents>\n"
    b"  <EncodingType>url</EncodingType>\n</ListBucketResult>\n"
)
PLAIN = (
    _NS + b"<IsTruncated>false</IsTruncated><Contents><Key>a+b%2B &lt;&#233;&gt; &amp;amp;</Key>"
    b"<LastModified>2026-11-30T14:15:48.000Z</LastModified><ETag>&quot;ab&quot;</ETag>"
    b"<Size>7</Size></Contents></ListBucketResult>"
)
STRANGE = (  # another order, CDATA, a namespace prefix, a comment
    b'<?xml version="1.0"?><s:ListBucketResult xmlns:s="x"><!-- hello --><s:Contents>'
    b"<s:Size>7</s:Size><s:ETag>ab</s:ETag><s:Key><![CDATA[a<b]]></s:Key>"
    b"<s:LastModified>2026-11-30T14:15:48Z</s:LastModified></s:Contents>"
    b"<s:IsTruncated>false</s:IsTruncated></s:ListBucketResult>"
)


def test_the_shape_of_aws():
    page = parse_page(AWS)
    assert page.objects == [Listed(b"a b+c%", 5, _T, b"0123-2")]
    assert page.prefixes == [b"d d/", b"e\n//"]
    assert page.token == b"1ueGcx&PTr/8="
    assert page.last_key == b"e\n//"


@pytest.mark.parametrize(
    ("body", "key", "size"),
    [
        (SEAWEEDFS, b"sp ace/x y", 0),
        (PRETTY, b"a&", 7),
        (PLAIN, "a+b%2B <\u00e9> &amp;".encode(), 7),
        (STRANGE, b"a<b", 7),
    ],
)
def test_other_shapes(body, key, size):
    page = parse_page(body)
    assert page.objects == [Listed(key, size, _T, b"ab")]
    assert page.token == b""


@pytest.mark.parametrize("body", [AWS, SEAWEEDFS, PRETTY, PLAIN])
def test_usual_shapes_take_the_quick_way(body, monkeypatch):
    assert s3_list._cut(body) is not None
    quick = parse_page(body)
    monkeypatch.setattr(s3_list, "_cut", lambda body: None)
    assert parse_page(body) == quick


_BAD_TIME = AWS.replace(b"14:15:48.000Z", b"xx:15:48.000Z")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<",
        b"hello",
        AWS[:-20],
        AWS[:300],
        b"<Error><Code>SlowDown</Code></Error>",
        b"<html><body>busy</body></html>",
        AWS.replace(b"<Size>5</Size>", b"<Size>five</Size>"),
        AWS.replace(b"<Size>5</Size>", b""),
        _BAD_TIME,
        AWS.replace(b"NextContinuationToken", b"Other"),
        AWS.replace(b"&amp;", b"&nbsp;"),
        b'<!DOCTYPE x [<!ENTITY a "b">]>' + _NS + b"&a;</ListBucketResult>",
        _NS + b"<a>" * 100_000,
    ],
)
def test_what_is_no_listing(body):
    with pytest.raises(ProtocolError):
        parse_page(body)


@given(st.binary(max_size=300), st.integers(0, len(AWS)), st.integers(0, 60))
def test_garbage_raises_nothing_else(junk, at, cut):
    for body in (junk, AWS[:at] + junk + AWS[at + cut :], PLAIN[: at % len(PLAIN)] + junk):
        with contextlib.suppress(ProtocolError):
            parse_page(body)


_KEYS = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=12))


@given(_KEYS, _KEYS, st.booleans(), st.booleans())
def test_keys_come_back(keys, prefixes, encoded, time_last):
    if not encoded:  # what XML can hold as it is
        keys = [k for k in keys if k.isprintable()]
        prefixes = [k for k in prefixes if k.isprintable()]

    def write(key):
        return quote_plus(key, safe="/") if encoded else escape(key)

    time = "<LastModified>2026-11-30T14:15:48Z</LastModified>"
    text = _NS.decode() + "<IsTruncated>false</IsTruncated>"
    text += "<EncodingType>url</EncodingType>" if encoded else ""
    for key in keys:
        size = "<ETag>ab</ETag><Size>7</Size>"
        rest = size + time if time_last else time + size
        text += f"<Contents><Key>{write(key)}</Key>{rest}</Contents>"
    for prefix in prefixes:
        text += f"<CommonPrefixes><Prefix>{write(prefix)}</Prefix></CommonPrefixes>"
    body = (text + "</ListBucketResult>").encode()
    assert s3_list._cut(body) == s3_list._parse(body)
    page = parse_page(body)
    assert [o.key for o in page.objects] == [k.encode() for k in keys]
    assert page.prefixes == [p.encode() for p in prefixes]
