"""`machinery relay`, as a user types it."""

from __future__ import annotations

from machinery_py import Server
from machinery_py.testing.waiting import wait_until
from tests.cli.app import TASKS, App, app_in_a_folder

app = app_in_a_folder

SHOP = (
    TASKS
    + """
from sqlalchemy.orm import Session
from machinery_py.contrib.sqlalchemy import Outbox

outbox = Outbox(server, "sqlite:///shop.db")
outbox.create()
with Session(outbox.engine) as session, session.begin():
    outbox.send(session, add.signature(20, 22))
"""
)


def test_relay_publishes_until_it_is_stopped(app: App) -> None:
    (app.folder / "tasks.py").write_text(SHOP)

    relay = app.start("relay", "tasks")
    relay.wait_for("Publishing the outbox of tasks. Ctrl+C stops.")

    server = Server(f"sqlite:///{app.folder}/machinery.db")
    wait_until(lambda: [stats.waiting for stats in server.broker.stats()] == [1])
    server.close()
    assert relay.stop() == 0


def test_app_without_an_outbox_is_told_so(app: App) -> None:
    assert "this Server has no outbox" in app.run("relay", "tasks", code=2).stderr
