"""The web service: takes sign-ups and answers at once; the mail is sent by a worker.

    POST /signup         {"email": …, "name": …}  →  202 {"task": "task_…", "state": "/tasks/…"}
    GET  /tasks/<uuid>   how far that mail is     →  200 {"state": "SUCCESS", …}

Wrong input is 400, an unreachable store is 503. It needs the standard library alone; a web
framework would look the same here.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import re
import signal
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

from tasks import send_mail, server

from machinery_py import MachineryError, PublishUnknown, StateNotFound

GIVE_UP = dt.timedelta(days=5)  # a mail that was not delivered by then is dropped
MAX_BODY = 10_000  # bytes
MAX_NAME = 200  # characters
ADDRESS = re.compile(
    r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~.-]{1,64}@(?=.{1,253}$)([A-Za-z0-9-]{1,63}\.)+[A-Za-z0-9-]{2,63}"
)

WELCOME = "Hello {name},\n\nwelcome to the shop. Nothing else to do.\n"


class BadRequest(Exception):
    """Error of a request; the text says what is wrong."""


class Signups(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    wbufsize: ClassVar[int] = -1  # buffered: head and body of an answer leave in one packet
    timeout = 30.0

    def do_POST(self) -> None:
        if self.path != "/signup":
            self.close_connection = True
            return self._answer(HTTPStatus.NOT_FOUND, {"error": f"no such page: {self.path}"})
        try:
            email, name = self._signup()
            text = WELCOME.replace("{name}", name)
            result = send_mail.options(expires=GIVE_UP).send(email, "Welcome", text)
        except BadRequest as error:
            self.close_connection = True
            return self._answer(HTTPStatus.BAD_REQUEST, {"error": str(error)})
        except PublishUnknown as error:
            return self._unavailable(f"may or may not have been accepted: {error}")
        except MachineryError as error:
            return self._unavailable(f"not accepted, try again: {error}")
        return self._answer(
            HTTPStatus.ACCEPTED, {"task": result.uuid, "state": f"/tasks/{result.uuid}"}
        )

    def do_GET(self) -> None:
        if not self.path.startswith("/tasks/"):
            return self._answer(HTTPStatus.NOT_FOUND, {"error": f"no such page: {self.path}"})
        uuid = self.path.removeprefix("/tasks/")
        try:
            state = server.result(uuid).get_state()
        except StateNotFound:
            return self._answer(HTTPStatus.NOT_FOUND, {"error": f"no such task: {uuid}"})
        except MachineryError as error:
            return self._unavailable(str(error))
        return self._answer(
            HTTPStatus.OK,
            {
                "task": uuid,
                "state": state.state.value,
                "attempt": state.attempt,
                "runs": state.run + 1,
                "error": state.error,
            },
        )

    def _signup(self) -> tuple[str, str]:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > MAX_BODY:
            raise BadRequest(f"Content-Length is {length!r} (expected at most {MAX_BODY:,} bytes)")
        try:
            body = json.loads(self.rfile.read(int(length)))
        except ValueError:
            raise BadRequest("the body is not JSON") from None
        email, name = (
            (body.get("email"), body.get("name")) if isinstance(body, dict) else (None, None)
        )
        if not isinstance(email, str) or not ADDRESS.fullmatch(email):
            raise BadRequest(f"email is {email!r}, not an address")
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise BadRequest(f"name is missing or not a line of 1 to {MAX_NAME} characters")
        return email, name

    def _unavailable(self, text: str) -> None:
        self._answer(HTTPStatus.SERVICE_UNAVAILABLE, {"error": text})

    def _answer(self, status: HTTPStatus, content: dict[str, Any]) -> None:
        body = json.dumps(content, ensure_ascii=False).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass  # no log line per request


class Service(ThreadingHTTPServer):
    """A thread for each connection."""

    daemon_threads = True
    request_queue_size = 128


def main() -> None:
    parser = argparse.ArgumentParser(description="Takes sign-ups over HTTP.")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    options = parser.parse_args()
    with Service(("127.0.0.1", options.port), Signups) as service:
        # shutdown() waits for serve_forever(), which this thread is in.
        signal.signal(
            signal.SIGTERM,
            lambda *_: threading.Thread(target=service.shutdown, name="shutdown").start(),
        )
        print(f"http://127.0.0.1:{service.server_address[1]}", flush=True)
        try:
            service.serve_forever(poll_interval=0.1)
        except KeyboardInterrupt:
            pass
    server.close()


if __name__ == "__main__":
    main()
