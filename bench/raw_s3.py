"""Raw S3 clients: ranged GETs at equal concurrency into a preallocated file. Each run is a process.

`python -m bench.raw_s3 KIND ENDPOINT BUCKET KEY SIZE TARGET` prints elapsed and CPU seconds,
without the start of the interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.contest import Turn
from bench.processes import watching

RANGE = 8 * 1024 * 1024
IN_FLIGHT = 8
KINDS = ("obstore", "boto3", "curl")


def _obstore(endpoint: str, bucket: str, key: str, size: int, fd: int) -> Callable[[int], None]:
    from obstore.store import S3Store

    store = S3Store(
        bucket,
        endpoint=endpoint,
        access_key_id="any",
        secret_access_key="anyany",
        region="us-east-1",
        virtual_hosted_style_request=False,
        client_options={"allow_http": True},
    )

    def fetch(offset: int) -> None:
        length = min(RANGE, size - offset)
        os.pwrite(fd, store.get_range(key, start=offset, length=length), offset)

    return fetch


def _boto3(endpoint: str, bucket: str, key: str, size: int, fd: int) -> Callable[[int], None]:
    import boto3
    from botocore.config import Config

    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id="any",
        aws_secret_access_key="anyany",
        region_name="us-east-1",
        config=Config(max_pool_connections=IN_FLIGHT, s3={"addressing_style": "path"}),
    )

    def fetch(offset: int) -> None:
        end = min(offset + RANGE, size) - 1
        answer = client.get_object(Bucket=bucket, Key=key, Range=f"bytes={offset}-{end}")
        os.pwrite(fd, answer["Body"].read(), offset)

    return fetch


def _main(kind: str, endpoint: str, bucket: str, key: str, size: int, target: str) -> None:
    fd = os.open(target, os.O_WRONLY)
    fetch = {"obstore": _obstore, "boto3": _boto3}[kind](endpoint, bucket, key, size, fd)
    before, start = os.times(), time.perf_counter()
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        list(pool.map(fetch, range(0, size, RANGE)))
    after = os.times()
    print(time.perf_counter() - start, sum(after[:2]) - sum(before[:2]))


def run(
    kind: str, endpoint: str, bucket: str, key: str, size: int, target: Path, server: list[int]
) -> Turn:
    """One turn of a raw client; GB/s."""
    if kind == "curl":
        return _curl(endpoint, bucket, key, size, target, server)
    command = [sys.executable, "-m", "bench.raw_s3", kind, endpoint, bucket, key, str(size)]
    with watching(server=server) as watch:
        answer = subprocess.run([*command, str(target)], check=True, capture_output=True, text=True)
    elapsed, cpu = (float(word) for word in answer.stdout.split())
    return Turn(size / elapsed / 1e9, {"client": cpu, "server": watch.cpu["server"]})


def _curl(endpoint: str, bucket: str, key: str, size: int, target: Path, server: list[int]) -> Turn:
    quarter = -(-size // 4)
    parts = [target.with_suffix(f".{n}") for n in range(4)]
    for n, part in enumerate(parts):
        if not part.exists():
            preallocate(part, min(quarter, size - n * quarter))
    with watching(server=server) as watch:
        jobs = [
            subprocess.Popen(
                f"curl -sf -r {n * quarter}-{min((n + 1) * quarter, size) - 1} "
                f"{endpoint}/{bucket}/{key} 1<>{part}",
                shell=True,
            )
            for n, part in enumerate(parts)
        ]
        if any(job.wait() for job in jobs):
            raise RuntimeError("curl failed")
    return Turn(size / watch.elapsed_s / 1e9, watch.cpu)


def preallocate(path: Path, size: int) -> None:
    """A file of `size` bytes whose blocks are allocated and written."""
    with path.open("wb") as file:
        zeros = bytes(1 << 20)
        for offset in range(0, size, 1 << 20):
            file.write(zeros[: min(1 << 20, size - offset)])
        file.flush()
        os.fsync(file.fileno())


if __name__ == "__main__":
    _main(*sys.argv[1:5], int(sys.argv[5]), sys.argv[6])
