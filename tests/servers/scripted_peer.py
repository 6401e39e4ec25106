"""A peer for unit tests of HTTP clients that says exactly what it is told to."""

import contextlib
import socket
import threading


class Peer:
    """Serves each connection by the next script: a list of answers, one per request. An answer is
    a list of pieces to send; a number is a pause in seconds, None closes. `asked`: the requests."""

    def __init__(self, *scripts):
        self.scripts = list(scripts)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.connections = 0
        self.asked = []
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._serve)

    def _serve(self):
        for script in self.scripts:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.connections += 1
            # Peers of hung tests end with the test.
            connection.settimeout(30)
            with connection, contextlib.suppress(OSError):
                self._talk(connection, script)

    def _talk(self, connection, script):
        for answer in script:
            asked = b""
            while not asked.endswith(b"\r\n\r\n"):
                more = connection.recv(65536)
                if not more:
                    return
                asked += more
            self.asked.append(asked)
            for piece in answer:
                if piece is None:
                    return
                if isinstance(piece, bytes):
                    connection.sendall(piece)
                else:
                    self.stop.wait(piece)
        with contextlib.suppress(OSError):
            connection.recv(1)  # until the client closes

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.stop.set()
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join(60)
        assert not self.thread.is_alive()
