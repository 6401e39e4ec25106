"""Free loopback ports for the launchers.

All ports lie in 20000-32767, below the range from which the kernel takes ports for outgoing
connections, so that none is lost between the test and the server's bind. A port that was given out
stays reserved for this process by an abstract unix socket (other test runs on this machine look at
it too) until `release`.
"""

import os
import random
import socket

_FIRST, _LAST = 20000, 32767
_PAIR_LAST = 22767
_random = random.Random()
_reserved: dict[int, int] = {}


def free_port(*, pair: bool = False) -> int:
    """A port that nobody listens on; with `pair`, port + 10000 is free as well.

    Raises RuntimeError when 2000 tries found none.
    """
    for _ in range(2000):
        port = _random.randint(_FIRST, _PAIR_LAST if pair else _LAST)
        wanted = [port, port + 10000] if pair else [port]
        if port in _reserved or not _reserve(port):
            continue
        if all(can_bind(p) for p in wanted):
            return port
        release(port)
    raise RuntimeError("no free port found")


def release(port: int) -> None:
    """Gives a port back; one that was not reserved is ignored."""
    fd = _reserved.pop(port, None)
    if fd is not None:
        os.close(fd)


def can_bind(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen on the port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((host, port))
            s.listen(1)
        except OSError:
            return False
    return True


def is_listening(port: int, host: str = "127.0.0.1") -> bool:
    """Whether something accepts connections on the port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        s.settimeout(2)
        return s.connect_ex((host, port)) == 0


def _reserve(port: int) -> bool:
    s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        s.bind(f"\0hsfs-test-port-{port}")
    except OSError:
        s.close()
        return False
    _reserved[port] = s.detach()
    return True
