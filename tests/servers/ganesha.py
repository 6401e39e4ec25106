"""NFS-Ganesha on 127.0.0.1: NFSv3 and MOUNT over TCP, any number side by side.

It runs in a pid and a mount namespace of its own, with its own rpcbind (`ganesha_inner.sh` says
why), so the machine's port 111 is not touched and killing one process ends all of it. Needs root,
or sudo without a password.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from tests.servers import ports
from tests.servers.process import (
    START_LIMIT_S,
    Process,
    Server,
    ServerError,
    children,
    command_name,
    executable,
    wait_stopped,
)

if TYPE_CHECKING:
    from tests.servers.netcap import CappedNet

_MOUNT_PROGRAM, _NFS_PROGRAM = 100005, 100003
_INNER = Path(__file__).with_name("ganesha_inner.sh")
_PLUGIN_FOLDERS = ("/usr/lib/x86_64-linux-gnu/ganesha", "/usr/lib/aarch64-linux-gnu/ganesha")


class Ganesha(Server):
    """One exported folder.

    `export` is the path that MOUNT takes, `port` and `mount_port` are TCP ports on 127.0.0.1;
    `protocols` "3", "4" or "3, 4". `squash` and `access` are Ganesha's words.
    """

    def __init__(
        self,
        export_dir: os.PathLike[str] | str,
        *,
        access: str = "RW",
        squash: str = "No_Root_Squash",
        protocols: str = "3",
        port: int | None = None,
        mount_port: int | None = None,
        extra_exports: tuple[os.PathLike[str] | str, ...] = (),
        extra_config: str = "",
        net: CappedNet | None = None,
        attr_expiration_s: int = 0,
    ) -> None:
        super().__init__("ganesha")
        self.export = os.path.realpath(export_dir)
        self.extra_exports = tuple(os.path.realpath(d) for d in extra_exports)
        self._access, self._squash, self._protocols = access, squash, protocols
        self._extra_config = extra_config
        self._enter = () if net is None else net.enter
        self.host = "127.0.0.1" if net is None else net.address
        self._attr_expiration_s = attr_expiration_s
        self.port = port or self._port()
        self.mount_port = mount_port or self._port()
        self.log = self.folder / "ganesha.log"
        self._process: Process | None = None

    @property
    def url(self) -> str:
        """The export as a backend URL."""
        return self.url_of(self.export)

    def url_of(self, export: str) -> str:
        """One of the exports, or a folder below one, as a backend URL."""
        path = quote(os.fsencode(export))
        return f"nfs://{self.host}{path}?port={self.port}&mountport={self.mount_port}"

    @property
    def pid(self) -> int:
        """The pid of ganesha.nfsd itself, for signals. Raises ServerError when it is gone."""
        for pid in self.pids:
            if command_name(pid) == "ganesha.nfsd":
                return pid
        raise ServerError("ganesha is not running")

    @property
    def pids(self) -> list[int]:
        """All processes of this server."""
        if self._process is None:
            return []
        return [self._process.pid, *children(self._process.pid)]

    def pause(self) -> None:
        """SIGSTOP, and returns when it has stopped: connections stay open and say nothing."""
        self._signal(signal.SIGSTOP)
        wait_stopped(self.pid)

    def resume(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; the ports stay ours for `restart`."""
        if self._process is not None:
            self._halt()

    def restart(self) -> None:
        """Starts again on the same ports and export, after `kill` or while running."""
        self.kill()
        self._launch()

    def _signal(self, number: int) -> None:
        if os.geteuid() == 0:
            os.kill(self.pid, number)
        else:
            subprocess.run(["sudo", "-n", "kill", f"-{number}", str(self.pid)], check=True)

    def _config(self) -> str:
        plugins = [p for p in (*_PLUGIN_FOLDERS, "/usr/lib/ganesha") if Path(p).is_dir()]
        folder = f'Plugins_Dir = "{plugins[0]}";' if plugins else ""
        exports = "".join(
            f'EXPORT {{ Export_Id = {i}; Path = "{path}"; Pseudo = "/export{i}"; '
            f"Protocols = {self._protocols}; Transports = TCP; Access_Type = {self._access}; "
            f"Squash = {self._squash}; SecType = sys; "
            f"Attr_Expiration_Time = {self._attr_expiration_s}; FSAL {{ Name = VFS; }} }}\n"
            for i, path in enumerate((self.export, *self.extra_exports), start=1)
        )
        return (
            f"NFS_CORE_PARAM {{ Bind_addr = {self.host}; "
            f"NFS_Port = {self.port}; MNT_Port = {self.mount_port}; Protocols = {self._protocols}; "
            "Enable_UDP = false; Enable_NLM = false; Enable_RQUOTA = false; "
            f"mount_path_pseudo = false; allow_set_io_flusher_fail = true; {folder} }}\n"
            "NFS_KRB5 { Active_krb5 = false; }\n"
            "NFSV4 { Graceless = true; Lease_Lifetime = 10; Allow_Numeric_Owners = true; "
            "Only_Numeric_Owners = true; RecoveryBackend = fs; "
            f'RecoveryRoot = "{self.folder}/state"; }}\n'
            "MDCACHE { Dir_Chunk = 0; }\n"
            "LOG { Default_Log_Level = EVENT; }\n"
            f"{self._extra_config}\n{exports}"
        )

    def _launch(self) -> None:
        # Each name is looked up first so that the error says which package is missing.
        for name in ("ganesha.nfsd", "rpcbind"):
            executable(name)
        (self.folder / "state").mkdir(exist_ok=True)
        config = self.folder / "ganesha.conf"
        config.write_text(self._config())
        deadline = time.monotonic() + 30
        while not (ports.can_bind(self.port) and ports.can_bind(self.mount_port)):
            if time.monotonic() > deadline:
                raise ServerError(f"ports {self.port} and {self.mount_port} are taken")
            time.sleep(0.1)
        sudo = [] if os.geteuid() == 0 else [executable("sudo"), "-n"]
        self._process = Process(
            [
                *sudo,
                *self._enter,
                executable("unshare"),
                *("--pid", "--fork", "--kill-child", "--mount", "--mount-proc"),
                *("--propagation", "private", "--"),
                *("/bin/sh", str(_INNER), str(config), str(self.log)),
            ],
            log=self.folder / "out",
            env={"PATH": os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"},
            stdin=subprocess.PIPE,
        )
        try:
            self._process.wait_until(self._answers, what="ganesha", limit_s=START_LIMIT_S)
        except ServerError as e:
            tail = ""
            with contextlib.suppress(OSError):
                tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])
            raise ServerError(f"{e}\n{tail}") from None

    def _answers(self) -> bool:
        services = [(self.port, _NFS_PROGRAM, 3), (self.mount_port, _MOUNT_PROGRAM, 3)]
        if "3" not in self._protocols:
            services = [(self.port, _NFS_PROGRAM, 4)]
        return all(_answers_null(self.host, *service) for service in services)

    def _halt(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if os.geteuid() == 0:
            # The first process of the pid namespace takes all others with it.
            for pid in children(process.pid)[:1]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        # Otherwise end of file on its standard input ends it (see ganesha_inner.sh).
        process.stop(signal.SIGTERM, limit_s=20)


def _answers_null(host: str, port: int, program: int, version: int) -> bool:
    """Whether an RPC server answers NULL (RFC 5531): a listening socket alone does not say it."""
    call = struct.pack(">10I", 1, 0, 2, program, version, 0, 0, 0, 0, 0)
    try:
        with socket.create_connection((host, port), timeout=2) as s:
            s.sendall(struct.pack(">I", 0x80000000 | len(call)) + call)
            reply = s.recv(64)
    except OSError:
        return False
    # mark, xid, REPLY, accepted, verifier (2 words), SUCCESS
    return len(reply) >= 28 and struct.unpack(">I", reply[24:28])[0] == 0
