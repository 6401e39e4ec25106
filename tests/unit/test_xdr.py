"""XDR: values survive the round trip, and whatever is cut or odd raises ProtocolError only."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsfs.core.errors import ProtocolError
from hsfs.proto.xdr import Packer, Unpacker, opaque, padded


def test_layout_is_the_rfc_s():
    packer = Packer().u32(1).u64(2).boolean(True).opaque(b"abcde").fixed(b"xy").raw(b"zzzz")
    assert bytes(packer.data) == (
        b"\0\0\0\1"
        + b"\0\0\0\0\0\0\0\2"
        + b"\0\0\0\1"
        + b"\0\0\0\5abcde\0\0\0"
        + b"xy\0\0"
        + b"zzzz"
    )


@pytest.mark.parametrize("length", range(9))
def test_opaques_are_padded_to_words(length):
    packed = opaque(b"x" * length)
    assert len(packed) == 4 + padded(length)
    assert len(packed) % 4 == 0


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.booleans(), st.binary(max_size=50))
def test_round_trip_whole_and_truncated(word, hyper, flag, data):
    packed = bytes(Packer().u32(word).u64(hyper).boolean(flag).opaque(data).fixed(data).data)

    def read(buffer):
        reader = Unpacker(buffer)
        got = reader.u32(), reader.u64(), reader.boolean(), reader.opaque(50)
        return (*got, reader.fixed(len(data)), reader.left)

    assert read(packed) == (word, hyper, flag, data, data, 0)
    for end in range(len(packed)):
        # The last byte of an empty tail may be absent without loss only if nothing is left.
        with pytest.raises(ProtocolError):
            read(packed[:end])


def test_limits_and_booleans():
    with pytest.raises(ProtocolError):
        Unpacker(opaque(b"x" * 9)).opaque(8)
    with pytest.raises(ProtocolError):
        Unpacker(b"\0\0\0\2").boolean()
    with pytest.raises(ProtocolError):
        Unpacker(b"\xff\xff\xff\xff").opaque(2**32)
