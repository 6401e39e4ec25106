"""The S3 launchers: each starts, serves what its tests need it for, and leaves nothing."""

from pathlib import Path

import botocore.exceptions
import pytest

from tests.servers import ports, s3_data
from tests.servers.moto_server import Moto
from tests.servers.rclone_s3 import RcloneS3
from tests.servers.seaweedfs import SeaweedFS

ODD_KEYS = [
    "a//b",
    "a/../b",
    "/lead",
    "trail/",
    "a/./b",
    "x\x01y",
    "..",
    "?#",
    "%~41",
    "b\u00fc\u00dfe",
]


def assert_nothing_left(server, pid):
    assert not Path("/proc", str(pid)).exists()
    assert ports.can_bind(server.port)
    assert not server.folder.exists()
    sockets = {f"seaweedfs-s3-grpc-{server.port + 10000}.sock", f"seaweedfs-s3-{server.port}.sock"}
    assert not sockets & {p.name for p in Path("/tmp").glob("seaweedfs-*.sock")}


def test_seaweedfs_stores_ranges_conditions_and_restarts(tmp_path):
    big = tmp_path / "big"
    big.write_bytes(bytes(range(256)) * (40 << 10))
    with SeaweedFS() as server:
        pid = server.pid
        server.create_bucket("bucket")
        server.create_bucket("bucket")
        objects = [(f"dir/{i}", b"%d" % i * 100) for i in range(200)]
        total = sum(len(body) for _, body in objects) + big.stat().st_size
        assert server.put_many("bucket", [*objects, ("big", big)]) == total
        s3 = server.client()
        etag = s3.head_object(Bucket="bucket", Key="dir/7")["ETag"]
        reply = s3.get_object(Bucket="bucket", Key="dir/7", Range="bytes=1-3", IfMatch=etag)
        assert reply["ResponseMetadata"]["HTTPStatusCode"] == 206
        assert reply["Body"].read() == b"777"
        with pytest.raises(botocore.exceptions.ClientError, match=r"412|PreconditionFailed"):
            s3.get_object(Bucket="bucket", Key="dir/7", IfMatch='"0"')
        assert s3.get_object(Bucket="bucket", Key="big")["Body"].read() == big.read_bytes()
        server.restart()
        assert s3.get_object(Bucket="bucket", Key="dir/8")["Body"].read() == b"8" * 100
        s3_data.delete_all(server.endpoint, "bucket", server.access_key, server.secret_key)
        assert s3.list_objects_v2(Bucket="bucket")["KeyCount"] == 0
        s3.close()
    assert_nothing_left(server, pid)


def test_seaweedfs_refuses_strangers_when_it_has_identities():
    with SeaweedFS(identities={"owner": "ownersecret", "guest:ro": "guestsecret"}) as server:
        server.create_bucket("bucket")
        assert server.put_many("bucket", [("key", b"value")]) == 5
        guest = s3_data.client(server.endpoint, "guest", "guestsecret")
        assert guest.get_object(Bucket="bucket", Key="key")["Body"].read() == b"value"
        with pytest.raises(botocore.exceptions.ClientError, match="AccessDenied"):
            guest.put_object(Bucket="bucket", Key="other", Body=b"")
        guest.close()
        for key, secret in (("stranger", "secret"), ("owner", "wrong")):
            other = s3_data.client(server.endpoint, key, secret)
            with pytest.raises(
                botocore.exceptions.ClientError, match=r"403|InvalidAccess|Signature"
            ):
                other.get_object(Bucket="bucket", Key="key")
            other.close()


def test_moto_keeps_odd_keys():
    with Moto() as server:
        pid = server.pid
        server.create_bucket("bucket")
        s3 = server.client()
        for key in ODD_KEYS:
            s3.put_object(Bucket="bucket", Key=key, Body=key.encode())
        listed = [e["Key"] for e in s3.list_objects_v2(Bucket="bucket")["Contents"]]
        assert sorted(listed) == sorted(ODD_KEYS)
        for key in ODD_KEYS:
            assert s3.get_object(Bucket="bucket", Key=key)["Body"].read() == key.encode()
        server.reset()
        assert s3.list_buckets()["Buckets"] == []
        s3.close()
    assert_nothing_left(server, pid)


def test_rclone_is_as_poor_as_it_has_to_be():
    with RcloneS3() as server:
        pid = server.pid
        server.create_bucket("bucket")
        assert server.put_many("bucket", [("dir/key", b"0123456789")]) == 10
        assert (server.data_dir / "bucket/dir/key").read_bytes() == b"0123456789"
        s3 = server.client()
        reply = s3.get_object(Bucket="bucket", Key="dir/key", Range="bytes=2-4", IfMatch='"no"')
        assert reply["ResponseMetadata"]["HTTPStatusCode"] == 200
        assert reply["Body"].read() == b"234"
        s3.close()
    assert_nothing_left(server, pid)
