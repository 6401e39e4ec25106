"""The made data: the same for the same seed, what its manifest says, and different everywhere."""

import os

from tests.servers.dataset import ODD_NAMES, Spec, differences, make_tree, scan

SPEC = Spec(shards=2, shard_size=300_001, small_files=120, parquet_size=100_000)


def test_tree_is_what_the_manifest_says_and_repeats(tmp_path):
    manifest = make_tree(tmp_path / "one", SPEC)
    assert differences(manifest, scan(tmp_path / "one")) == []
    assert make_tree(tmp_path / "two", SPEC) == manifest
    assert make_tree(tmp_path / "three", SPEC, seed=2) != manifest
    assert manifest[b"shards/shard-00001.tar"].size == 300_001
    assert (tmp_path / "one/tables/part-0.parquet").stat().st_size == 100_000
    assert set(ODD_NAMES) <= set(os.listdir(os.fsencode(tmp_path / "one/odd")))
    small = [e.size for path, e in manifest.items() if path.endswith(b".jpg")]
    assert len(small) == 120
    assert min(small) >= SPEC.small_min
    assert max(small) <= SPEC.small_max


def test_no_two_blocks_are_equal(tmp_path):
    make_tree(tmp_path, Spec(shards=3, shard_size=1 << 20, small_files=0, odd_names=False))
    blocks = set()
    for shard in (tmp_path / "shards").iterdir():
        body = shard.read_bytes()
        blocks |= {body[at : at + 65536] for at in range(0, len(body), 65536)}
    assert len(blocks) == 48


def test_differences_are_named(tmp_path):
    manifest = make_tree(tmp_path, SPEC)
    (tmp_path / "empty/0").write_bytes(b"x")
    (tmp_path / "empty/1").unlink()
    (tmp_path / "more").write_bytes(b"")
    found = differences(manifest, scan(tmp_path))
    assert [line.split(":")[0] for line in found] == ["differs", "missing", "unexpected"]
