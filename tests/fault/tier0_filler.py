"""A process that keeps filling a cache directory, to be killed: `python tier0_filler.py DIR SIZE`.

Prints `ready` when it has begun. Files are those of the ChunkStore suite: ino n, a size by n.
"""

import random
import sys
from pathlib import Path

from hsfs.cache.store import open_store
from hsfs.core.blocks import split
from hsfs.core.errors import NoSpace
from tests.conformance.chunk_store_suite import Source, file, whole

SIZES = [100, 100_000, 131_072, 400_000, 3_000_000, 9_000_000]


def file_of(n):
    return file(n, SIZES[n % len(SIZES)])


def main():
    store = open_store(Path(sys.argv[1]), int(sys.argv[2]), fd_limit=32, flush_s=0.02)
    order = random.Random(int(sys.argv[3]))
    print("ready", flush=True)
    while True:
        f = file_of(order.randrange(60))
        try:
            handle = store.create(f)
            for piece in split(whole(f), 1 << 20):
                if order.random() < 0.9:
                    handle.fill(piece, Source(f).read)
            handle.release()
        except NoSpace:
            pass
        if order.random() < 0.02:
            store.evict([order.randrange(60)])


if __name__ == "__main__":
    main()
