"""A cache that is full, read-only, gone or damaged under a mount: reads are right all the same,
`status` says why, and the cache is used again when it can be."""

import contextlib
import itertools
import os
import random
import shutil
import signal
import subprocess

import pytest

from tests.mount.command import Hsfs, end, eventually
from tests.mount.sources import Folder, content

MIB = 1 << 20


class Disk:
    """A file system for the cache: tmpfs, or ext4 on a loop device (`errors` = its option)."""

    def __init__(self, place, *, size, errors=""):
        self.place = place
        place.mkdir()
        if not errors:
            self._mount("tmpfs", "tmpfs", f"size={size}")
            return
        image = place.with_suffix(".image")
        with open(image, "wb") as file:
            file.truncate(size)
        subprocess.run(
            ["mkfs.ext4", "-q", "-m", "0", str(image)], check=True, timeout=60, capture_output=True
        )
        self._mount("ext4", str(image), f"loop,errors={errors}")

    def _mount(self, kind, what, options):
        command = ["mount", "-t", kind, "-o", options, what, str(self.place)]
        subprocess.run(command, check=True, timeout=60)

    def again(self, options):
        subprocess.run(
            ["mount", "-o", f"remount,{options}", str(self.place)], check=True, timeout=60
        )

    def unmount(self):
        while os.path.ismount(self.place):
            subprocess.run(["umount", "-l", str(self.place)], check=True, timeout=60)


class Place:
    """A mount of a local folder, with a cache where the test wants it."""

    def __init__(self, files=6, size=3 * MIB):
        self.hsfs = Hsfs()
        self.mnt = self.hsfs.mountpoint()
        self.source = Folder(self.hsfs.root / "src", "/")
        self.want = {}
        for number in range(files):
            for name, length in ((f"big{number}", size + number), (f"small{number}", 50_000)):
                self.want[name] = content(name, length)
                self.source.put(name, self.want[name])
        backend = {"name": "src", "url": f"file://{self.source.folder}", "at": "/"}
        self.volume = self.hsfs.volume(backend, mount={"readahead": "1M"})
        self.reader = self.hsfs.reader()

    def __enter__(self):
        return self

    def __exit__(self, *what):
        self.hsfs.__exit__(*what)

    def mount(self):
        self.hsfs.mount(self.volume, self.mnt)

    def add(self, name, size=2 * MIB):
        """A file that no cache has yet."""
        self.want[name] = content(name, size)
        self.source.put(name, self.want[name])
        self.hsfs.refresh(self.mnt)

    def read_all(self):
        for name, data in self.want.items():
            answer = self.reader.read(self.mnt / name)
            assert answer.is_(data), (name, answer, self.hsfs.status(self.mnt))

    def trouble(self):
        return self.hsfs.status(self.mnt)["cache_trouble"]

    def fetched(self):
        return sum(self.hsfs.stats(self.mnt)["backend_bytes"].values())

    def evict(self):
        self.hsfs.json("evict", self.mnt)

    def caches_again(self):
        """New files are cached, and nobody complains. (One that was read around the cache stays in
        the kernel's pages: another read of it does not reach us.)"""
        attempts = itertools.count()

        def cached():
            name = f"later{next(attempts)}"
            self.add(name, 300_000)
            assert self.reader.read(self.mnt / name).is_(self.want[name])
            return self.hsfs.info(self.mnt / name)["cached_bytes"] == 300_000

        eventually(cached, lambda: self.hsfs.status(self.mnt))
        eventually(lambda: self.trouble() == "", self.trouble)


def with_cache(place, directory):
    """The same volume with its cache in another directory."""
    text = place.volume.read_text().replace(str(place.hsfs.root / "cache"), str(directory))
    place.volume.write_text(text)


def test_a_disk_that_is_full():
    """Far smaller than cache.size: what fits is cached, the rest is read through."""
    with Place() as place:
        disk = Disk(place.hsfs.root / "disk", size=12 * MIB)
        try:
            with_cache(place, disk.place / "cache")
            place.mount()
            place.read_all()
            handles = list(place.want)
            for name in handles:
                assert place.reader.open(place.mnt / name, name) == ""
            for offset in range(0, 3 * MIB, 700_000):
                for name in handles:
                    right = place.want[name][offset : offset + 10_000]
                    assert place.reader.pread(name, offset, 10_000).is_(right), (name, offset)
            for name in handles:
                place.reader.do("close", name=name)
            # Somebody else takes what is left.
            fill_up(disk.place / "hog")
            place.add("full", 5 * MIB)
            place.read_all()
            (disk.place / "hog").unlink()
            place.evict()
            place.caches_again()
            place.hsfs.umount(place.mnt)
        finally:
            disk.unmount()


def test_a_disk_that_becomes_read_only():
    with Place() as place:
        disk = Disk(place.hsfs.root / "disk", size=64 * MIB, errors="remount-ro")
        try:
            with_cache(place, disk.place / "cache")
            place.mount()
            place.read_all()
            # As after an I/O error, though files are open for writing.
            disk.again("abort")
            place.add("new")
            place.read_all()
            eventually(lambda: place.trouble() != "", "status says why")
            assert place.hsfs.status(place.mnt)["state"] == "degraded"
            assert any("cache" in note for note in place.hsfs.status(place.mnt)["notes"])
            assert place.hsfs.run("status", place.mnt, check=3).stdout.count("cache is out of use")
            place.read_all()
            place.hsfs.umount(place.mnt)
        finally:
            disk.unmount()


def test_read_only_and_writable_again():
    with Place() as place:
        disk = Disk(place.hsfs.root / "disk", size=64 * MIB)
        try:
            disk.again("ro")
            with_cache(place, disk.place / "cache")
            place.mount()
            place.read_all()
            assert "ead-only" in place.trouble()
            disk.again("rw")
            place.caches_again()
            place.read_all()
            place.hsfs.umount(place.mnt)
        finally:
            disk.unmount()


@pytest.mark.parametrize("how", ["removed", "unmounted"])
def test_a_directory_that_goes_and_comes(how):
    with Place() as place:
        disk = Disk(place.hsfs.root / "disk", size=64 * MIB)
        cache = disk.place / "cache"
        try:
            with_cache(place, cache)
            place.mount()
            place.read_all()
            assert place.reader.open(place.mnt / "big0", "h") == ""
            if how == "removed":
                shutil.rmtree(cache)
            else:
                disk.unmount()
            place.add("new")
            place.read_all()
            assert place.reader.pread("h", 1 * MIB, MIB).is_(place.want["big0"][MIB : 2 * MIB])
            place.reader.do("close", name="h")
            if how == "unmounted":
                # The path is now on another disk, which is not ours to fill.
                eventually(lambda: place.trouble() != "", "status says why")
                assert not cache.exists() or not any(cache.rglob("*-*"))
                disk._mount("tmpfs", "tmpfs", f"size={64 * MIB}")
            place.caches_again()
            place.read_all()
            place.hsfs.umount(place.mnt)
        finally:
            disk.unmount()


def test_a_directory_that_can_not_be_made():
    with Place() as place:
        (place.hsfs.root / "file").write_bytes(b"")
        with_cache(place, place.hsfs.root / "file" / "cache")
        done = place.hsfs.run("mount", place.volume, place.mnt, check=None)
        if done.returncode:
            assert done.returncode == 32 or done.returncode == 1, done.stderr
            assert "file" in done.stderr
            assert "Traceback" not in done.stderr
            return
        place.hsfs.note_pids()
        place.read_all()
        assert place.trouble()


def fill_up(path):
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(MIB)):
            pass
    left = os.statvfs(path)
    assert left.f_bavail * left.f_frsize < MIB


def damage(path, moments, how):
    size = path.stat().st_size
    with open(path, "r+b") as file:
        if how == "truncated":
            file.truncate(moments.randrange(size))
            return
        for _ in range(1 if how == "flipped" else 200):
            at = moments.randrange(size)
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 0x55]))


@pytest.mark.parametrize("stop", ["killed", "unmounted"])
@pytest.mark.parametrize("how", ["flipped", "truncated"])
def test_cache_files_that_are_damaged_while_nobody_looks(stop, how):
    moments = random.Random(f"{stop} {how}")
    with Place() as place:
        place.mount()
        place.read_all()
        eventually(lambda: place.hsfs.status(place.mnt)["cache_files"] == len(place.want), "cached")
        if stop == "killed":
            end(place.hsfs.mount_pid(place.mnt), signal.SIGKILL)
            place.hsfs.umount(place.mnt, "--force")
        else:
            place.hsfs.umount(place.mnt)
        files = [path for path in place.hsfs.cache.rglob("*-*") if path.is_file()]
        assert len(files) == len(place.want)
        for path in files:
            damage(path, moments, how)
        place.mount()
        place.read_all()
        assert place.fetched() > 0
        place.read_all()
        place.caches_again()
        place.hsfs.umount(place.mnt)


@pytest.mark.parametrize("how", ["flipped much", "truncated", "removed"])
def test_a_damaged_index(how):
    """Of what it can't read it knows nothing; it never makes other bytes of it."""
    moments = random.Random(how)
    with Place() as place:
        place.mount()
        place.read_all()
        place.hsfs.umount(place.mnt)
        (index,) = place.hsfs.cache.glob("*/index")
        if how == "removed":
            index.unlink()
        else:
            damage(index, moments, how)
        place.mount()
        place.read_all()
        place.caches_again()
        place.hsfs.umount(place.mnt)
        place.mount()
        place.read_all()
        place.hsfs.umount(place.mnt)


def test_files_of_others_in_the_cache_directory_are_left_alone():
    with Place(files=1) as place:
        place.hsfs.cache.mkdir()
        theirs = [place.hsfs.cache / "README", place.hsfs.cache / "0" / "notes"]
        theirs[1].parent.mkdir()
        for path in theirs:
            path.write_bytes(b"theirs")
        place.mount()
        place.read_all()
        place.evict()
        place.hsfs.umount(place.mnt)
        assert [path.read_bytes() for path in theirs] == [b"theirs"] * 2
