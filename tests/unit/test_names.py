"""Names both ways: the table of DESIGN's forms, and the bijection as a property."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsfs.core.names import PIECE_MAX, Dialect, Form, Native, plain, read, show

FLAT, TREE = Dialect.FLAT, Dialect.TREE

FORMS = [
    (b"plain.txt", Form.SEGMENT, False, (b"plain.txt",)),
    ("ä ö\n\t".encode(), Form.SEGMENT, False, ("ä ö\n\t".encode(),)),
    (b"100%~off", Form.SEGMENT, False, (b"100%~25%~7Eoff",)),
    (b"%~41", Form.SEGMENT, False, (b"%~25%~7E41",)),
    (b"%%~~", Form.SEGMENT, False, (b"%%~25%~7E~",)),
    (b"a\0b", Form.SEGMENT, False, (b"a%~00b",)),
    (b"", Form.SEGMENT, False, (b"%~e",)),
    (b".", Form.SEGMENT, False, (b"%~d",)),
    (b"..", Form.SEGMENT, False, (b"%~dd",)),
    (b"...", Form.SEGMENT, False, (b"...",)),
    (b".hsfs", Form.SEGMENT, False, (b".hsfs",)),
    (b".hsfs", Form.SEGMENT, True, (b"%~2Ehsfs",)),
    (b".hsfs", Form.BESIDE, True, (b"%~2Ehsfs%~o",)),
    (b"NAME", Form.BESIDE, False, (b"NAME%~o",)),
    (b".", Form.BESIDE, False, (b"%~d%~o",)),
    (b"NAME%~o", Form.SEGMENT, False, (b"NAME%~25%~7Eo",)),
    (b"", Form.MARKER, False, (b"%~m",)),
    (b"%~m", Form.SEGMENT, False, (b"%~25%~7Em",)),
    (b"x" * 200, Form.SEGMENT, False, (b"x" * 200,)),
    (b"x" * 200, Form.BESIDE, False, (b"x" * 200 + b"%~o",)),
    (b"x" * 201, Form.SEGMENT, False, (b"%~+" + b"x" * 200, b"x")),
    (b"x" * 201, Form.BESIDE, False, (b"%~+" + b"x" * 200, b"x%~o")),
    (b"x" * 400 + b"..", Form.SEGMENT, False, (b"%~+" + b"x" * 200,) * 2 + (b"%~dd",)),
    (b"x" * 198 + b"\0y", Form.SEGMENT, False, (b"%~+" + b"x" * 198, b"%~00y")),
    (b"x" * 199 + "ä".encode(), Form.SEGMENT, False, (b"%~+" + b"x" * 199, "ä".encode())),
    (b"%~FF", Form.SEGMENT, False, (b"\xff",)),
    (b"%~C3%~A4", Form.SEGMENT, False, (b"%~25%~7EC3%~25%~7EA4",)),
]


@pytest.mark.parametrize(("segment", "form", "at_root", "names"), FORMS)
def test_forms_of_object_stores(segment, form, at_root, names):
    assert show(segment, form, dialect=FLAT, at_root=at_root) == names
    assert read(names, dialect=FLAT, at_root=at_root) == Native(segment, form)


@pytest.mark.parametrize(
    "names",
    [
        (b"%~",),
        (b"%~4",),
        (b"%~41",),  # A needs no escape
        (b"%~0a",),  # hex digits are upper case
        (b"%~25",),
        (b"%~zz",),
        (b"%~o",),
        (b"%~e%~e",),
        (b"x%~e",),
        (b"%~m%~o",),
        (b"a%~o%~o",),
        (b"%~2F",),
        (b"%~2Ehsfs",),
        (b"%~+abc", b"d"),
        (b"%~+" + b"x" * 200,),
        (b"%~+" + b"x" * 199, b"xy"),
        (b"x" * 201,),
        (b"",),
        (),
    ],
)
def test_names_that_nothing_has(names):
    assert read(names, dialect=FLAT) is None


def test_file_systems_keep_every_name_that_fits():
    for name in (b"x" * 255, b"\xff\xfe", b"a%b~c", "名".encode() * 85, b"..."):
        assert show(name, dialect=TREE) == (name,)
        assert read((name,), dialect=TREE) == Native(name, Form.SEGMENT)
    assert show(b"%~" * 2, dialect=TREE) == (b"%~25%~7E" * 2,)
    long = b"%~" + b"x" * 250
    names = show(long, dialect=TREE)
    assert len(names) == 2
    assert read(names, dialect=TREE) == Native(long, Form.SEGMENT)
    for nothing in (b"%~e", b"%~d", b"%~dd", b"%~m", b"x%~o", b"%~00"):
        assert read((nothing,), dialect=TREE) is None


ODD_PARTS = st.sampled_from(
    [b"%~", b"%", b"~", b"\0", b".", b"..", b"e", b"d", b"o", b"m", b"+", b"%~o", b"%~+", b"25",
     b"7E", b".hsfs", "ü".encode(), "名".encode(), b"x" * 99, b"%~FF", b"%~C3"]
)  # fmt: skip
KEYS = st.one_of(
    st.lists(ODD_PARTS, max_size=12).map(b"".join),
    st.text(st.characters(exclude_characters="/", exclude_categories=["Cs"])).map(str.encode),
)
TREE_NAMES = (
    st.one_of(st.lists(ODD_PARTS, max_size=12).map(b"".join), st.binary(max_size=255))
    .map(lambda name: name.replace(b"/", b"").replace(b"\0", b"")[:255])
    .filter(lambda name: name not in (b"", b".", b".."))
)


@given(KEYS, st.sampled_from([Form.SEGMENT, Form.BESIDE]), st.booleans())
def test_every_segment_has_one_form(segment, form, at_root):
    if form is Form.BESIDE and not segment:
        return
    names = show(segment, form, dialect=FLAT, at_root=at_root)
    assert read(names, dialect=FLAT, at_root=at_root) == Native(segment, form)
    assert all(0 < len(name) <= 255 and b"/" not in name and b"\0" not in name for name in names)
    assert not {b".", b".."} & set(names)
    assert all(name.startswith(b"%~+") and len(name) <= PIECE_MAX + 3 for name in names[:-1])
    assert not names[-1].startswith(b"%~+")
    if plain(segment) and form is Form.SEGMENT:
        assert names == (segment,)


@given(TREE_NAMES, st.booleans())
def test_every_file_name_has_one_form(name, at_root):
    names = show(name, dialect=TREE, at_root=at_root)
    assert read(names, dialect=TREE, at_root=at_root) == Native(name, Form.SEGMENT)
    assert all(0 < len(part) <= 255 for part in names)


@given(st.lists(ODD_PARTS, min_size=1, max_size=5).map(b"".join), st.booleans(), st.booleans())
def test_a_name_is_read_only_in_its_canonical_form(name, at_root, tree):
    dialect = TREE if tree else FLAT
    native = read((name,), dialect=dialect, at_root=at_root)
    if native is not None:
        assert show(native.segment, native.form, dialect=dialect, at_root=at_root) == (name,)
