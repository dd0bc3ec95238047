"""The dashboard mounted below a prefix in real Flask, Django and FastAPI, as the how-to has it."""

from __future__ import annotations

import contextlib
import http.client
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from machinery_py.dashboard import asgi, live
from machinery_py.testing.waiting import HANG, wait_until
from tests.dashboard.site import Site
from tests.dashboard.test_web import basic, event, open_stream
from tests.docs.pages import blocks
from tests.support.apps import Bench, bench

__all__ = ["bench"]

PAGE = "docs/how-to/dashboard.md"
AUTH = basic("ada:correct horse")


def application(name: str, server: Any) -> dict[str, Any]:
    """Return what a program of the how-to defines; its `tasks` module has this server."""
    [block] = [one for one in blocks(PAGE, "python") if one.file == name]
    tasks = types.ModuleType("tasks")
    tasks.server = server  # type: ignore[attr-defined]  # as the user's module has it
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tasks", tasks)
        found: dict[str, Any] = {"__name__": name.removesuffix(".py")}
        exec(compile(block.text, name, "exec"), found)
    return found


@contextlib.contextmanager
def over_wsgi(app: Any) -> Iterator[Site]:
    from werkzeug.serving import make_server

    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield Site(f"http://127.0.0.1:{server.server_port}/machinery/")
    finally:
        server.shutdown()
        thread.join(HANG)
        server.server_close()


@contextlib.contextmanager
def over_asgi(app: Any) -> Iterator[Site]:
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="on"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield Site(f"http://127.0.0.1:{port}/machinery/")
    finally:
        server.should_exit = True
        thread.join(HANG)
        assert not thread.is_alive()


def check_mounted(bench: Bench, site: Site) -> None:
    """Check what holds below every prefix, as a user who may see it."""
    bench.add.send(1, 2)
    outside = Site(site.address.removesuffix("machinery/"))
    outside.headers = site.headers
    redirect = outside.request("GET", "machinery")
    page = site.request("GET", "")
    assert redirect.status in (307, 308)
    assert redirect.headers["Location"].endswith("/machinery/")
    assert page.status == 200 and b"<script" in page.body
    assert outside.request("GET", "machinery2").status == 404
    assert site.request("GET", "none.js").status == 404

    cookie = page.headers["Set-Cookie"]
    assert "; Path=/machinery/" in cookie
    token = cookie.partition(";")[0].partition("=")[2]
    body = b'{"queue": "machinery_tasks"}'
    origin = {"Origin": site.address.removesuffix("/machinery/"), "Sec-Fetch-Site": "same-origin"}
    own = {"Cookie": f"{site.headers.get('Cookie', 'a=b')}; machinery_csrf={token}"} | origin
    own["Content-Type"] = "application/json"
    path = "api/queues/pause"
    assert site.request("POST", path, body, **own).status == 403
    assert site.request("POST", path, body, **own, X_CSRF_Token=token).status == 200
    large = site.request("POST", path, b" " * 1_500_000, **own, X_CSRF_Token=token)
    assert large.status == 413

    assert site.get("queues")[0]["paused"] is True
    assert len(site.get("tasks", name="add", state=["PENDING", "RETRY"])["tasks"]) == 1
    assert site.request("HEAD", "api/queues").body == b""
    with contextlib.closing(open_stream(site)) as stream:
        assert event(stream)["user"] == "ada"


def test_dashboard_is_mounted_in_flask(bench: Bench) -> None:
    with over_wsgi(application("flask_app.py", bench.server)["app"]) as site:
        refused = site.request("GET", "api/queues")
        site.headers["Authorization"] = AUTH

        assert refused.status == 401
        check_mounted(bench, site)


def test_dashboard_is_mounted_in_fastapi(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MOST_STREAMS", 1)
    monkeypatch.setattr(asgi, "STREAM_PAUSE", 0.01)
    streams: list[http.client.HTTPResponse] = []

    def is_served() -> bool:
        streams.append(open_stream(site))
        return streams[-1].status == 200

    with over_asgi(application("fastapi_app.py", bench.server)["app"]) as site:
        refused = site.request("GET", "api/queues")
        site.headers["Authorization"] = AUTH

        assert refused.status == 401
        check_mounted(bench, site)
        wait_until(is_served)  # its reader has gone
        streams[-1].close()
        monkeypatch.setattr(live, "STREAM_LIFE", 0.5)  # uvicorn waits for open streams at its end
        wait_until(is_served)
    assert streams[-1].read()


def test_dashboard_is_mounted_in_django_for_its_staff(bench: Bench, tmp_path: Path) -> None:
    import django
    from django.conf import settings

    settings.configure(
        ALLOWED_HOSTS=["*"],
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": tmp_path / "d.db"}},
        INSTALLED_APPS=[
            "django.contrib.auth",
            "django.contrib.contenttypes",
            "django.contrib.sessions",
        ],
        LOGGING_CONFIG=None,
        ROOT_URLCONF=types.ModuleType("urls"),
        SECRET_KEY="s" * 50,
    )
    settings.ROOT_URLCONF.urlpatterns = []
    django.setup()
    from django.contrib.auth import get_user_model
    from django.contrib.sessions.backends.db import SessionStore
    from django.core.management import call_command

    call_command("migrate", verbosity=0)
    cookies = {}
    for name, is_staff in (("ada", True), ("eve", False)):
        user = get_user_model().objects.create_user(name, is_staff=is_staff)
        session = SessionStore()
        session["_auth_user_id"] = str(user.pk)
        session["_auth_user_backend"] = "django.contrib.auth.backends.ModelBackend"
        session["_auth_user_hash"] = user.get_session_auth_hash()
        session.save()
        cookies[name] = f"sessionid={session.session_key}"

    with over_wsgi(application("django_app.py", bench.server)["application"]) as site:
        assert site.request("GET", "api/queues").status == 403
        assert site.request("GET", "api/queues", Cookie=cookies["eve"]).status == 403
        site.headers["Cookie"] = cookies["ada"]
        check_mounted(bench, site)
