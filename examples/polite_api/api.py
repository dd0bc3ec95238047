"""An API to try the example with: `python api.py`. It allows each tenant so many calls a second.

It prints a line for each call; `limit`: calls in any second of one tenant.
"""

from __future__ import annotations

import collections
import http.server
import sys
import time

Calls = dict[str, list[float]]


def serve(port: int, *, limit: int) -> tuple[http.server.ThreadingHTTPServer, Calls, list[str]]:
    """Return a server, the times of the calls that it took, and the tenants told to wait."""
    taken: Calls = collections.defaultdict(list)
    refused: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            tenant, now = self.path.split("/")[1], time.monotonic()
            if sum(one > now - 1.0 for one in taken[tenant]) >= limit:
                refused.append(tenant)
                self.send_response(429)
                self.send_header("Retry-After", "1")
                self.end_headers()
                return
            taken[tenant].append(now)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"thanks")

        def log_message(self, format: str, *args: object) -> None:
            if __name__ == "__main__":
                sys.stdout.write(f"{format % args}\n")

    return http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler), taken, refused


if __name__ == "__main__":
    serve(8099, limit=10)[0].serve_forever()
