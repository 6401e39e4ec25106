import pytest

from hsfs.cli.mount_options import parse_options, split_words
from hsfs.core.errors import UsageError


def test_words():
    assert split_words(r"a,b=c\,d,,e\\f") == ["a", "b=c,d", "e\\f"]


def test_what_fstab_needs_for_itself_is_ignored():
    text = (
        "rw,_netdev,nofail,auto,noauto,user,users,nouser,defaults,x-systemd.automount,"
        "x-gvfs-hide,comment=hello,relatime,ro,exec,user=joe"
    )
    words = parse_options([text])
    assert words.values == {}
    assert words.passed == ()
    assert not words.allow_other
    assert words.notes == ("mounted read-only: writing is not in this version",)


def test_what_is_ours():
    words = parse_options(
        ["allow_other,cache_dir=/a\\,b,cache_size=1G", "memory_limit=256M,noexec,nosuid,strict"]
    )
    assert words.allow_other
    assert words.strict
    assert words.values == {"cache_dir": "/a,b", "cache_size": "1G", "memory_limit": "256M"}
    assert words.passed == ("noexec", "nosuid")


@pytest.mark.parametrize(
    ("text", "why", "step"),
    [
        ("alow_other", "unknown mount option", 'did you mean "allow_other"?'),
        ("cache_size", "needs a value", "write cache_size=..."),
        ("cache_size=", "needs a value", ""),
        ("allow_other=1", "takes no value", "write allow_other"),
        ("session=fast", "must be one of", ""),
        ("remount", "can't be done", "unmount"),
        ("xyzzy=1", "unknown mount option", "known are"),
    ],
)
def test_complaints(text, why, step):
    with pytest.raises(UsageError) as caught:
        parse_options([text])
    assert text.split("=")[0] in caught.value.what
    assert why in caught.value.why
    assert step in caught.value.next_step


def test_sloppy_ignores_the_unknown_only():
    assert parse_options(["xyzzy=1,cache_size=1G"], sloppy=True).values == {"cache_size": "1G"}
    with pytest.raises(UsageError):
        parse_options(["cache_size"], sloppy=True)
