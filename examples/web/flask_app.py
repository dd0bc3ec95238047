"""Reports over HTTP with Flask: `gunicorn --threads 32 flask_app:app`."""

import json
import time
from collections.abc import Iterator
from typing import Any

from flask import Flask, Response, current_app, request

from bodies import BadOrder, read_order
from machinery_py import Server, StateNotFound
from machinery_py.contrib.flask import init_app
from reports import report, server, shown

app = Flask(__name__)
init_app(server, app)  # tasks run in the app's context, if the worker imports this module

Answer = tuple[dict[str, Any], int] | tuple[dict[str, Any], int, dict[str, str]]


def get_server() -> Server:
    found: Server = current_app.extensions["machinery"]
    return found


@app.post("/reports")
def order() -> Answer:
    order = read_order(request.get_data())
    return {"id": get_server().send(report.signature(order.rows)).uuid}, 202


@app.get("/reports/<uuid>")
def look(uuid: str) -> dict[str, Any]:
    return shown(get_server().result(uuid).get_state())


@app.get("/reports/<uuid>/events")
def follow(uuid: str) -> Response:
    look(uuid)  # 404 before the stream begins
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return Response(events(get_server(), uuid), headers=headers, mimetype="text/event-stream")


def events(server: Server, uuid: str) -> Iterator[str]:
    """Yield an event for each change, until the report has ended. It holds a thread."""
    last = ""
    while True:
        state = server.result(uuid).get_state()
        now = json.dumps(shown(state))
        # A comment, while nothing changes: the web server sees by it that the client is gone.
        yield f"data: {now}\n\n" if now != last else ":\n\n"
        if state.is_finished:
            return
        last = now
        time.sleep(0.5)


@app.get("/health")
def health() -> dict[str, int]:
    return {"workers": len(get_server().inspect.workers())}


@app.errorhandler(BadOrder)
def bad_input(error: BadOrder) -> Answer:
    return {"detail": str(error)}, 400


@app.errorhandler(StateNotFound)
def not_found(error: StateNotFound) -> Answer:
    return {"detail": "no such report"}, 404


@app.errorhandler(ConnectionError)  # BrokerUnavailable, BackendUnavailable
def unavailable(error: ConnectionError) -> Answer:
    return {"detail": "come back later"}, 503, {"Retry-After": "5"}
