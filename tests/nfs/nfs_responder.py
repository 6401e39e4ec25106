"""A small NFSv3 server for what Ganesha can't be made to do: leave attributes out, refuse
READDIRPLUS, answer in other orders, in fragments, short, later, or only to a file's owner.

Portmapper, MOUNT and NFS on one port, one thread per connection, a tree given as {key: content}.
It is the second server of the NFS backend's tests, not a stand-in for the first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import select
import socket
import struct
import threading

from hsfs.proto import nfs3, rpc
from hsfs.proto.nfs3 import Attributes, FileKind, Status
from hsfs.proto.xdr import Packer, Unpacker


@dataclasses.dataclass
class Behaviour:
    """What is odd about the server; may be changed while it runs."""

    read_max: int = 1 << 20
    readdirplus: bool = True
    attributes: bool = True  # in replies other than GETATTR's
    handles: bool = True  # in READDIRPLUS
    fragment: int = 0  # bytes per fragment; 0 = one fragment
    verifier: bytes = b""
    short_read: int = 0  # bytes that one READ gives at most; 0 = all
    reverse: bool = False  # answer what came together last first
    jukebox: int = 0  # so many calls are told to come back later
    owner_only: bool = False  # READ, LOOKUP and READDIR for the owner's uid alone
    versions: tuple[int, int] = (3, 3)
    flavors: tuple[int, ...] = (1,)
    refuse_auth: bool = False
    registered: tuple[int, ...] = (rpc.PROGRAM_NFS, rpc.PROGRAM_MOUNT)  # with the portmapper
    generation: int = 1  # handles of another generation are stale
    page: int = 3  # entries per page of a listing
    endless: bool = False  # a listing whose cookies do not advance
    entry_name: bytes = b""  # sent in place of every name


@dataclasses.dataclass
class _File:
    fileid: int
    data: bytes | None  # None = a directory
    target: bytes = b""
    uid: int = 0
    mtime_ns: int = 1_600_000_000_000_000_000


class NfsResponder:
    """`with NfsResponder({b"dir/file": b"..."}, links={b"l": b"target"}) as server`."""

    def __init__(self, files, *, links=None, behaviour=None):
        self.behaviour = behaviour or Behaviour()
        self.calls: list[tuple[int, int]] = []  # (procedure, uid)
        self.peers: list[tuple[str, int]] = []  # one per connection
        self._tree = {b"": _File(1, None)}
        for key, data in files.items():
            self.write(key, data)
        for key, target in (links or {}).items():
            self.write(key, b"")
            self._tree[key].target = target

    def write(self, key, data, *, uid=0):
        """Make or change a file; directories above it are made."""
        segments = key.split(b"/")
        for i in range(1, len(segments)):
            self._tree.setdefault(b"/".join(segments[:i]), _File(len(self._tree) + 1, None))
        old = self._tree.get(key)
        fileid = old.fileid if old else len(self._tree) + 1
        mtime_ns = old.mtime_ns + 1 if old else _File.mtime_ns
        self._tree[key] = _File(fileid, data, uid=uid, mtime_ns=mtime_ns)

    def chown(self, key, uid):
        self._tree[key].uid = uid

    @property
    def url(self):
        return f"nfs://127.0.0.1/export?port={self.port}&mountport={self.port}"

    def count(self, procedure):
        """How often a procedure of NFS was called."""
        return sum(1 for p, _ in self.calls if p == procedure)

    def __enter__(self):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open = {self._listener}
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()
        return self

    def __exit__(self, *_):
        for sock in list(self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        self._listener.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                sock, peer = self._listener.accept()
                self.peers.append(peer)
                self._open.add(sock)
                thread = threading.Thread(target=self._serve, args=(sock,))
                self._threads.append(thread)
                thread.start()

    def _serve(self, sock):
        reader = rpc.RecordReader()
        with sock, contextlib.suppress(OSError):
            while data := sock.recv(65536):
                records = reader.feed(data)
                if self.behaviour.reverse:
                    while select.select([sock], [], [], 0.05)[0]:
                        more = sock.recv(65536)
                        if not more:
                            break
                        records += reader.feed(more)
                    records.reverse()
                sock.sendall(b"".join(self._framed(self._answer(r)) for r in records))
        self._open.discard(sock)

    def _framed(self, body):
        size = self.behaviour.fragment or max(len(body), 1)
        pieces = [body[i : i + size] for i in range(0, len(body), size)]
        return b"".join(
            struct.pack(">I", (rpc.LAST_FRAGMENT if i == len(pieces) else 0) | len(piece)) + piece
            for i, piece in enumerate(pieces, start=1)
        )

    def _answer(self, record):
        call = rpc.parse_call(record)
        behaviour = self.behaviour
        if behaviour.refuse_auth and call.flavor == rpc.AUTH_SYS:
            return struct.pack(">5I", call.xid, 1, 1, 1, rpc.AuthStatus.TOOWEAK)
        head = struct.pack(">4I", call.xid, 1, 0, 0) + bytes(
            Packer().opaque(behaviour.verifier).data
        )
        low, high = behaviour.versions
        if call.program == rpc.PROGRAM_NFS and not low <= call.version <= high:
            return head + struct.pack(">3I", 2, low, high)
        arguments = Unpacker(record, call.body)
        if call.program == rpc.PROGRAM_PORTMAP:
            registered = self.port if arguments.u32() in behaviour.registered else 0
            return head + struct.pack(">II", 0, registered)
        if call.program == rpc.PROGRAM_MOUNT:
            return head + b"\0\0\0\0" + self._mount(call.procedure, arguments)
        if call.procedure == nfs3.NULL:
            return head + b"\0\0\0\0"
        uid = rpc.parse_auth_sys(call.credentials)[0]
        self.calls.append((call.procedure, uid))
        return head + b"\0\0\0\0" + bytes(self._nfs(call.procedure, arguments, uid).data)

    def _mount(self, procedure, arguments):
        if procedure == nfs3.MOUNTPROC_EXPORT:
            return bytes(Packer().u32(1).opaque(b"/export").u32(0).u32(0).data)
        path = arguments.opaque(1000)
        if path != b"/export":
            return struct.pack(">I", nfs3.MountStatus.ACCES)
        out = Packer().u32(0).opaque(self._handle(self._tree[b""]))
        out.u32(len(self.behaviour.flavors))
        for flavor in self.behaviour.flavors:
            out.u32(flavor)
        return bytes(out.data)

    def _handle(self, file):
        return struct.pack(">IQ", self.behaviour.generation, file.fileid)

    def _attributes(self, file):
        kind, size = FileKind.REG, len(file.data or b"")
        if file.data is None:
            kind = FileKind.DIR
        elif file.target:
            kind, size = FileKind.LNK, len(file.target)
        times = file.mtime_ns
        return Attributes(
            kind, 0o644, 1, file.uid, 0, size, size, 0, 0, 9, file.fileid, times, times, times
        )

    def _post_op(self, out, file):
        if self.behaviour.attributes:
            return out.u32(1).raw(nfs3.pack_attributes(self._attributes(file)))
        return out.u32(0)

    def _nfs(self, procedure, arguments, uid):
        behaviour = self.behaviour
        if behaviour.jukebox:
            behaviour.jukebox -= 1
            return Packer().u32(Status.JUKEBOX).u32(0).u32(0)
        generation, fileid = struct.unpack(">IQ", arguments.opaque(64))
        key, file = next(((k, f) for k, f in self._tree.items() if f.fileid == fileid), (b"", None))
        if file is None or generation != behaviour.generation:
            return Packer().u32(Status.STALE).u32(0).u32(0)
        if procedure == nfs3.GETATTR:
            return Packer().u32(0).raw(nfs3.pack_attributes(self._attributes(file)))
        if behaviour.owner_only and uid != file.uid:
            return Packer().u32(Status.ACCES).u32(0).u32(0)
        prefix = key + b"/" if key else b""
        if procedure == nfs3.LOOKUP:
            found = self._tree.get(prefix + arguments.opaque(1000))
            if found is None:
                return Packer().u32(Status.NOENT).u32(0)
            out = Packer().u32(0).opaque(self._handle(found))
            return self._post_op(self._post_op(out, found), file)
        if procedure == nfs3.READLINK:
            return self._post_op(Packer().u32(0), file).opaque(file.target)
        if procedure == nfs3.FSINFO:
            out = self._post_op(Packer().u32(0), file)
            size = behaviour.read_max
            return out.raw(
                struct.pack(">7IQIII", size, size, 1, size, size, 1, 4096, 2**60, 0, 1, 0)
            )
        if procedure == nfs3.FSSTAT:
            return self._post_op(Packer().u32(0), file).raw(
                struct.pack(">6QI", *(6 * [1 << 30]), 0)
            )
        if procedure == nfs3.READ:
            return self._read(file, arguments.u64(), arguments.u32())
        if procedure in (nfs3.READDIR, nfs3.READDIRPLUS):
            return self._list(procedure, prefix, file, arguments)
        return Packer().u32(Status.NOTSUPP).u32(0)

    def _read(self, file, offset, count):
        if file.data is None:
            return Packer().u32(Status.ISDIR).u32(0)
        data = file.data[offset : offset + count]
        if self.behaviour.short_read:
            data = data[: self.behaviour.short_read]
        eof = offset + len(data) >= len(file.data)
        return self._post_op(Packer().u32(0), file).u32(len(data)).boolean(eof).opaque(data)

    def _list(self, procedure, prefix, directory, arguments):
        behaviour = self.behaviour
        plus = procedure == nfs3.READDIRPLUS
        if plus and not behaviour.readdirplus:
            return Packer().u32(Status.NOTSUPP).u32(0)
        if directory.data is not None:
            return Packer().u32(Status.NOTDIR).u32(0)
        names = [
            key[len(prefix) :]
            for key in self._tree
            if key and key.startswith(prefix) and b"/" not in key[len(prefix) :]
        ]
        start = 0 if behaviour.endless else arguments.u64()
        out = self._post_op(Packer().u32(0), directory).fixed(b"VERIFIER")
        for cookie, name in enumerate(names[start : start + behaviour.page], start=start + 1):
            file = self._tree[prefix + name]
            out.u32(1).u64(file.fileid).opaque(behaviour.entry_name or name)
            out.u64(0 if behaviour.endless else cookie)
            if plus:
                self._post_op(out, file)
                if behaviour.handles:
                    out.u32(1).opaque(self._handle(file))
                else:
                    out.u32(0)
        return out.u32(0).boolean(not behaviour.endless and start + behaviour.page >= len(names))
