from hypothesis import given
from hypothesis import strategies as st

from hsfs.core.placement import DeviceFacts, cut, plan
from hsfs.core.types import CHUNK_SIZE, DeviceId, Extent, Place, Replica

extents = st.builds(Extent, st.integers(0, 1 << 28), st.integers(0, 1 << 26))
facts = st.builds(
    DeviceFacts,
    healthy=st.booleans(),
    in_flight=st.integers(0, 20),
    concurrency=st.integers(1, 16),
    bytes_per_s=st.floats(0, 1e10),
)


def replica(device: int, proven: bool = True) -> Replica:
    return Replica(device, Place(b"k"), b"v", proven)


@given(extents, st.integers(1, 1 << 24))
def test_cut_covers_exactly_and_stays_within_units(extent, unit):
    unit = max(unit, 1 << 16)
    position = extent.offset
    for part in cut(extent, unit):
        assert part.offset == position
        assert part.length > 0
        assert part.offset // unit == (part.end - 1) // unit
        position = part.end
    assert position == extent.end


@given(
    extents,
    st.lists(st.tuples(st.integers(1, 4), st.booleans()), max_size=4, unique_by=lambda r: r[0]),
    st.dictionaries(st.integers(1, 4), facts),
)
def test_plan_covers_with_proven_replicas_only(extent, devices, known):
    replicas = [replica(device, proven) for device, proven in devices]
    proven = {r for r in replicas if r.proven}
    reads = plan(extent, replicas, known)
    if not proven or not extent.length:
        assert reads == ()
        return
    assert sum(read.extent.length for read in reads) == extent.length
    position = extent.offset
    for read in reads:
        assert read.extent.offset == position
        position = read.extent.end
        assert set(read.replicas) == proven
        assert read.extent.length <= CHUNK_SIZE


@given(extents, st.dictionaries(st.integers(1, 3), facts, min_size=3))
def test_ill_devices_are_the_last_resort(extent, known):
    replicas = [replica(device) for device in (1, 2, 3)]
    for read in plan(extent, replicas, known):
        health = [known[DeviceId(r.device)].healthy for r in read.replicas]
        assert health == sorted(health, reverse=True)


def test_chunks_are_shared_in_proportion_to_pace():
    known = {
        DeviceId(1): DeviceFacts(bytes_per_s=3e8, concurrency=100),
        DeviceId(2): DeviceFacts(bytes_per_s=1e8, concurrency=100),
    }
    reads = plan(Extent(0, 40 * CHUNK_SIZE), [replica(1), replica(2)], known)
    first = sum(read.replicas[0].device == 1 for read in reads)
    assert 28 <= first <= 32


def test_an_unknown_device_comes_last():
    known = {DeviceId(2): DeviceFacts()}
    (read,) = plan(Extent(0, 10), [replica(1), replica(2)], known)
    assert [r.device for r in read.replicas] == [2, 1]
