"""`make demo`: the main job on real input.

Starts NFS-Ganesha and a SeaweedFS S3 server with training-like data, mounts both and a local folder
as one tree by the command, lists it, reads all of it cold, disk-warm and page-warm, holds every
checksum against the source, prints a table, unmounts and leaves nothing behind.

`python -m tests.demo [--small] [--keep]`. Exit 0 only when everything was right.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from tests.servers import dataset
from tests.servers.ganesha import Ganesha
from tests.servers.seaweedfs import SeaweedFS

HSFS = str(Path(sys.executable).parent / "hsfs")
BUCKET = "training"
READERS = 4


@dataclass
class Pass:
    """One reading of the whole tree."""

    name: str
    elapsed_s: float
    size: int
    from_backends: int
    hits: int

    @property
    def rate(self) -> float:
        return self.size / self.elapsed_s / 1e9


class Failed(Exception):
    """The demo found something wrong; the text says what."""


def say(text: str) -> None:
    print(text, flush=True)


def hsfs(*words: str) -> dict:
    """A verb's JSON object. Raises Failed with its error."""
    done = subprocess.run(
        [HSFS, *words, "--json"], capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode not in (0, 3):
        raise Failed(f"hsfs {' '.join(words)}: {done.stdout.strip()} {done.stderr.strip()}")
    return json.loads(done.stdout)


def read_tree(root: Path) -> dataset.Manifest:
    """Sizes and checksums of all files, read by a few readers at once."""
    names = list(dataset.files_below(root))
    base = os.fsencode(root)
    with ThreadPoolExecutor(READERS) as pool:
        found = pool.map(lambda name: dataset.digest(os.path.join(base, name)), names)
        return dict(zip(names, found, strict=True))


def check(got: dataset.Manifest, want: dataset.Manifest, label: str) -> None:
    wrong = dataset.differences(want, got)
    if wrong:
        lines = "\n  ".join(wrong[:20])
        raise Failed(f"{label}: {len(wrong)} of {len(want)} files are not the source's:\n  {lines}")


def fetched(mountpoint: Path) -> tuple[int, int]:
    """Bytes that came from backends so far, and reads that Tier 0 answered."""
    stats = hsfs("stats", str(mountpoint))
    if "mounts" in stats:
        stats = stats["mounts"][0]
    return int(stats["fetched_bytes"]), int(stats["cache_hits"])


def one_pass(name: str, root: Path, want: dataset.Manifest) -> Pass:
    before = fetched(root)
    start = time.perf_counter()
    got = read_tree(root)
    elapsed = time.perf_counter() - start
    after = fetched(root)
    check(got, want, name)
    size = sum(entry.size for entry in got.values())
    return Pass(name, elapsed, size, after[0] - before[0], after[1] - before[1])


def drop_pages() -> None:
    """Empty the page cache; without root the pass is page-warm as well, and the table says so."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("1\n")


def raw_rate(files: list[Path]) -> float:
    """GB/s of plain reads of files on the disk, page cache dropped."""
    drop_pages()
    start, size = time.perf_counter(), 0
    for path in files:
        size += dataset.digest(path).size
    return size / (time.perf_counter() - start) / 1e9


def raw_s3_rate(server: SeaweedFS, keys: list[str]) -> float:
    """GB/s of a raw S3 client that fetches whole objects, eight at once."""
    from obstore.store import S3Store

    store = S3Store(
        BUCKET,
        endpoint=server.endpoint,
        access_key_id=server.access_key,
        secret_access_key=server.secret_key,
        region="us-east-1",
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )
    start = time.perf_counter()
    with ThreadPoolExecutor(8) as pool:
        size = sum(pool.map(lambda key: len(store.get(key).bytes()), keys))
    return size / (time.perf_counter() - start) / 1e9


def prefixed(manifest: dataset.Manifest, prefix: bytes) -> dataset.Manifest:
    """As the mount shows it: a literal `%~`, the lead of escapes, is escaped itself."""
    return {prefix + name.replace(b"%~", b"%~25%~7E"): entry for name, entry in manifest.items()}


def upload(server: SeaweedFS, source: Path, manifest: dataset.Manifest) -> None:
    def objects() -> Iterator[tuple[str, Path]]:
        for name in manifest:
            key = os.fsdecode(name)
            yield key, source / key

    server.create_bucket(BUCKET)
    server.put_many(BUCKET, objects())


def run(work: Path, spec: dataset.Spec) -> None:
    say("making the data")
    nas, lake, local = work / "nas", work / "lake", work / "local"
    want: dataset.Manifest = {}
    want |= prefixed(dataset.make_tree(nas, spec, seed=1), b"nas/")
    in_bucket = dataset.make_tree(lake, replace(spec, odd_names=False, empty_files=1), seed=2)
    for number, key in enumerate(dataset.ODD_KEYS):
        body = b"".join(dataset.content(3 << 40 | number, 1000 + 97 * number))
        path = lake / "odd" / key
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(body)
        in_bucket[b"odd/" + key.encode()] = dataset.digest(path)
    want |= prefixed(in_bucket, b"lake/")
    few = replace(spec, shards=1, small_files=spec.small_files // 10)
    want |= prefixed(dataset.make_tree(local, few, seed=4), b"local/")
    total = sum(entry.size for entry in want.values())
    say(f"  {len(want):,} files, {total / (1 << 20):,.0f} MiB")

    say("starting NFS-Ganesha and SeaweedFS")
    with Ganesha(nas) as ganesha, SeaweedFS(work / "s3") as weed:
        upload(weed, lake, in_bucket)
        os.environ.update(AWS_ACCESS_KEY_ID=weed.access_key, AWS_SECRET_ACCESS_KEY=weed.secret_key)
        volume = work / "volume.toml"
        volume.write_text(
            f'[volume]\nname = "demo"\nstate = "{work / "state"}"\n'
            f'[cache]\ndir = "{work / "cache"}"\nsize = "{max(4 * total >> 20, 512)}M"\n'
            f'[[backend]]\nname = "nas"\nurl = "{ganesha.url}"\n'
            f'[[backend]]\nname = "lake"\nurl = "s3://{BUCKET}"\nendpoint = "{weed.endpoint}"\n'
            f'region = "us-east-1"\n'
            f'[[backend]]\nname = "local"\nurl = "file://{local}"\n'
        )
        mountpoint = work / "mnt"
        mountpoint.mkdir()
        say(f"$ hsfs mount {volume} {mountpoint}")
        start = time.perf_counter()
        subprocess.run([HSFS, "mount", str(volume), str(mountpoint)], check=True, timeout=120)
        say(f"  mounted in {time.perf_counter() - start:.2f} s")
        try:
            passes, listing_s = use(mountpoint, want)
        finally:
            done = subprocess.run([HSFS, "umount", str(mountpoint)], check=False, timeout=120)
        if done.returncode != 0 or os.path.ismount(mountpoint):
            raise Failed("umount left the mount behind")
        disk = raw_rate(sorted(lake.glob("shards/*")) + sorted(nas.glob("shards/*")))
        raw = raw_s3_rate(weed, [os.fsdecode(n) for n in in_bucket if n.startswith(b"shards/")])
        table(passes, listing_s, len(want), disk, raw)
        stop_server(volume)


def use(mountpoint: Path, want: dataset.Manifest) -> tuple[list[Pass], float]:
    """List, read cold, disk-warm and page-warm."""
    say("listing the tree")
    start = time.perf_counter()
    names = set(dataset.files_below(mountpoint))
    listing_s = time.perf_counter() - start
    if names != set(want):
        missing, surplus = set(want) - names, names - set(want)
        raise Failed(f"listing: missing {sorted(missing)[:5]}, unexpected {sorted(surplus)[:5]}")
    passes = []
    for name in ("cold", "disk-warm", "page-warm"):
        say(f"reading everything, {name}, and checking every checksum")
        if name == "disk-warm":
            drop_pages()
        passes.append(one_pass(name, mountpoint, want))
    if passes[0].from_backends < passes[0].size:
        raise Failed("the cold pass fetched less than it read")
    for warm in passes[1:]:
        if warm.from_backends:
            raise Failed(f"the {warm.name} pass fetched {warm.from_backends:,} bytes again")
    for folder in ("nas", "lake", "local"):
        target = mountpoint / folder / "new"
        try:
            target.write_bytes(b"")
        except OSError as error:
            if error.errno != 30:
                raise Failed(f"writing {target}: {error} instead of EROFS") from error
        else:
            raise Failed(f"{target} could be written")
    return passes, listing_s


def stop_server(volume: Path) -> None:
    """End the embedded metadata server at once instead of after its 30 idle seconds."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if os.fsencode(volume.parent) in words and b"mds" in words:
            os.kill(int(folder.name), 15)
            deadline = time.monotonic() + 20
            while folder.exists() and time.monotonic() < deadline:
                time.sleep(0.05)


def table(passes: list[Pass], listing_s: float, files: int, disk: float, raw: float) -> None:
    say("")
    say(f"{'pass':<12}{'GB/s':>8}{'files/s':>10}{'from backends':>18}{'Tier 0 hits':>14}")
    for one in passes:
        rate = files / one.elapsed_s
        say(
            f"{one.name:<12}{one.rate:>8.2f}{rate:>10,.0f}"
            f"{one.from_backends / (1 << 20):>14,.0f} MiB{one.hits:>14,}"
        )
    say(f"{'raw S3':<12}{raw:>8.2f}    the bucket's shards by a raw client, not stored")
    say(f"{'disk':<12}{disk:>8.2f}    the shards read from the disk itself, checksummed as above")
    say(f"{'listing':<12}{files / listing_s:>8,.0f}    names/s")
    say("")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="a tenth of the data")
    parser.add_argument("--keep", action="store_true", help="leave the folder for a look")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        say("demo: NFS-Ganesha and dropping the page cache need root: running it by sudo")
        os.execvp("sudo", ["sudo", "-E", sys.executable, "-m", "tests.demo", *sys.argv[1:]])
    spec = dataset.Spec(shards=3, shard_size=64 << 20, small_files=1000, parquet_size=24 << 20)
    if arguments.small:
        spec = replace(spec, shards=1, shard_size=8 << 20, small_files=200, parquet_size=1 << 20)
    work = Path(tempfile.mkdtemp(prefix="hsfs-demo-", dir="/var/tmp"))
    try:
        run(work, spec)
    except (Failed, subprocess.SubprocessError) as error:
        say(f"demo: FAILED: {error}")
        for log in work.glob("state/*.log"):
            say(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}")
        return 1
    finally:
        if os.path.ismount(work / "mnt"):
            subprocess.run(["umount", "-l", str(work / "mnt")], check=False, timeout=30)
        if not arguments.keep:
            shutil.rmtree(work, ignore_errors=True)
    say("everything was read right, three times; unmounted; nothing is left behind")
    return 0


if __name__ == "__main__":
    sys.exit(main())
