"""Filling S3 servers quickly: obstore for plain keys in bulk, boto3 for the rest."""

from __future__ import annotations

import concurrent.futures
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import boto3
import botocore.config
import botocore.exceptions
import obstore
from obstore.store import S3Store

if TYPE_CHECKING:
    from collections.abc import Iterable

Client = Any
REGION = "us-east-1"
_PART_SIZE = 8 << 20


def environment(endpoint: str, access_key: str, secret_key: str) -> dict[str, str]:
    """Variables of the AWS chain for one server, and none of the user's own."""
    return {
        "AWS_ACCESS_KEY_ID": access_key,
        "AWS_SECRET_ACCESS_KEY": secret_key,
        "AWS_REGION": REGION,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_ENDPOINT_URL_S3": endpoint,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }


def client(endpoint: str, access_key: str = "any", secret_key: str = "anyany") -> Client:
    """A boto3 S3 client with path style and few retries. The caller closes it."""
    return boto3.session.Session().client(
        "s3",
        endpoint_url=endpoint,
        region_name=REGION,
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        config=botocore.config.Config(
            signature_version="s3v4",
            s3={"addressing_style": "path"},
            retries={"total_max_attempts": 2},
            connect_timeout=20,
            read_timeout=120,
            max_pool_connections=32,
        ),
    )


def store(
    endpoint: str, bucket: str, access_key: str = "any", secret_key: str = "anyany"
) -> S3Store:
    """An obstore store of one bucket."""
    return S3Store(
        bucket,
        endpoint=endpoint,
        region=REGION,
        access_key_id=access_key,
        secret_access_key=secret_key,
        virtual_hosted_style_request=False,
        client_options={"allow_http": True, "timeout": "120s"},
    )


def answers(endpoint: str, access_key: str = "any", secret_key: str = "anyany") -> bool:
    """Whether the server lists its buckets."""
    s3 = client(endpoint, access_key, secret_key)
    try:
        s3.list_buckets()
    except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError):
        return False
    finally:
        s3.close()
    return True


def create_bucket(
    endpoint: str, bucket: str, access_key: str = "any", secret_key: str = "anyany"
) -> None:
    """Makes a bucket; one that exists already is fine."""
    s3 = client(endpoint, access_key, secret_key)
    try:
        s3.create_bucket(Bucket=bucket)
    except botocore.exceptions.ClientError as e:
        if e.response["Error"]["Code"] not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
            raise
    finally:
        s3.close()


def put_many(
    endpoint: str,
    bucket: str,
    objects: Iterable[tuple[str, bytes | Path]],
    access_key: str = "any",
    secret_key: str = "anyany",
    *,
    concurrency: int = 16,
) -> int:
    """Puts objects in parallel and gives their total size; a Path is uploaded from its file.

    Keys have to be plain paths (obstore would normalise others: use `client` for those).
    """
    target = store(endpoint, bucket, access_key, secret_key)

    def put(item: tuple[str, bytes | Path]) -> int:
        key, body = item
        if isinstance(body, Path):
            size = body.stat().st_size
            if size > _PART_SIZE:
                obstore.put(target, key, body, chunk_size=_PART_SIZE, max_concurrency=4)
                return size
            body = body.read_bytes()
        obstore.put(target, key, body, use_multipart=False)
        return len(body)

    total = 0
    with concurrent.futures.ThreadPoolExecutor(concurrency) as pool:
        pending: set[concurrent.futures.Future[int]] = set()
        for item in objects:
            # Bounded, so that a generator of a million objects is not read ahead into memory.
            if len(pending) >= 4 * concurrency:
                done, pending = concurrent.futures.wait(
                    pending, return_when=concurrent.futures.FIRST_COMPLETED
                )
                total += sum(f.result() for f in done)
            pending.add(pool.submit(put, item))
        total += sum(f.result() for f in pending)
    return total


def delete_all(
    endpoint: str, bucket: str, access_key: str = "any", secret_key: str = "anyany"
) -> None:
    """Empties a bucket."""
    s3 = client(endpoint, access_key, secret_key)
    try:
        for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket):
            keys = [{"Key": entry["Key"]} for entry in page.get("Contents", [])]
            if keys:
                s3.delete_objects(Bucket=bucket, Delete={"Objects": keys, "Quiet": True})
    finally:
        s3.close()
