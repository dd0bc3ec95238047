"""Stands in front of a stand-in for MongoDB that wants newer clients than it needs.

nx-27017 tells clients that it speaks wire versions 17 to 25. The client library of Go Machinery v1
knows those up to 9, and hangs up; but the server understands what it then sends (OP_MSG).
"""

from __future__ import annotations

import socket
import socketserver
import threading
from typing import Self

from machinery_py.testing.waiting import HANG

TOLD, CHANGED = (b"\x10minWireVersion\0" + number.to_bytes(4, "little") for number in (17, 0))


class _Handler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        target: int = self.server.target  # type: ignore[attr-defined]
        with socket.create_connection(("127.0.0.1", target), HANG) as server:
            server.settimeout(None)
            back = threading.Thread(target=_copy, args=(server, self.request, True), daemon=True)
            back.start()
            _copy(self.request, server, False)
            back.join(HANG)


def _copy(source: socket.socket, to: socket.socket, changes: bool) -> None:
    try:
        while data := source.recv(65536):
            to.sendall(data.replace(TOLD, CHANGED) if changes else data)
    except OSError:
        pass
    for one in (to, source):
        try:
            one.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


class Relay(socketserver.ThreadingTCPServer):
    """Listens on a port of its own until it is left."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, target: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = target
        self.port: int = self.server_address[1]
        self._thread = threading.Thread(target=self.serve_forever, name="relay", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join(HANG)
        self.server_close()
