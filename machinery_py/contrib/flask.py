"""Flask: the tasks of a Server run in the app's context; docs/how-to/frameworks.md.

    app = Flask(__name__)
    init_app(server, app)

Tasks then have `current_app`, `g`, and the extensions that need them, in threads, coroutines and
task processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from machinery_py.server import Server
from machinery_py.tasks.signature import Signature

try:
    from flask import Flask
except ImportError as _error:
    raise ImportError(
        "machinery_py.contrib.flask needs Flask 3: pip install 'machinery_py[flask]'"
    ) from _error

EXTENSION = "machinery"  # in `app.extensions`

_apps: WeakKeyDictionary[Server, Flask] = WeakKeyDictionary()


def init_app(server: Server, app: Flask) -> None:
    """Run each task of the Server in an application context of its own.

    Call it in the module of the app or in its factory, so that workers and task processes, which
    import that module, do so, too. The context ends with the run, however that ends; functions of
    `teardown_appcontext` get the exception of the task. A view finds the Server as
    `current_app.extensions["machinery"]`.

    Called again for the same Server, as tests do that make an app each, the new app replaces the
    old one.
    """
    app.extensions[EXTENSION] = server
    is_new = server not in _apps
    _apps[server] = app
    if not is_new:
        return

    @server.around_task
    def in_context(_: Signature[Any]) -> Iterator[None]:
        with _apps[server].app_context():
            yield
