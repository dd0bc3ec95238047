"""An API to try the example with: `python api.py`. It allows each tenant so many orders a second.

It prints a line for each call; `limit`: orders in any second of one tenant.
"""

from __future__ import annotations

import collections
import http.server
import json
import sys
import time

Calls = dict[str, list[float]]


def serve(port: int, *, limit: int) -> tuple[http.server.ThreadingHTTPServer, Calls, list[str]]:
    """Return a server, the times of the orders that it took, and the tenants told to wait."""
    taken: Calls = collections.defaultdict(list)
    refused: list[str] = []

    def takes(tenant: str, now: float) -> bool:
        if sum(one > now - 1.0 for one in taken[tenant]) < limit:
            taken[tenant].append(now)
            return True
        refused.append(tenant)
        return False

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            """Take one order, of the tenant in the path."""
            if takes(self.path.split("/")[1], time.monotonic()):
                self.answer(200, b"thanks")
            else:
                self.answer(429, b"", ("Retry-After", "1"))

        def do_POST(self) -> None:
            """Take a list of [tenant, order]; answer which places are to come again, and when."""
            orders = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            now = time.monotonic()
            late = {
                place: 1.0 for place, (tenant, _) in enumerate(orders) if not takes(tenant, now)
            }
            self.answer(200, json.dumps(late).encode())

        def answer(self, status: int, body: bytes, *headers: tuple[str, str]) -> None:
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            if __name__ == "__main__":
                sys.stdout.write(f"{format % args}\n")

    return http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler), taken, refused


if __name__ == "__main__":
    serve(8099, limit=10)[0].serve_forever()
