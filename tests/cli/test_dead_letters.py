"""Commands on dead letters."""

from __future__ import annotations

from machinery_py.testing.waiting import wait_until
from tests.cli.app import HANG, App, app_in_a_folder

app = app_in_a_folder

BURST = ("worker", "tasks", "--burst")


def write_garbage(app: App, count: int) -> None:
    """Messages that are no signature, in the queue."""
    app.write(
        "garbage.py",
        f"""
from machinery_py.brokers.base import Message
from tasks import server
message = Message(uuid="", name="", queue="machinery_tasks", body=b"\\x1b[31mno json")
server.broker.put([message] * {count}, token="")
""",
    )
    app.python("garbage.py")


def test_dead_letters_are_listed_shown_and_deleted(app: App) -> None:
    write_garbage(app, 2)
    app.run(*BURST)

    letters = app.json("dead", "list", "tasks")
    assert [one["reason"] for one in letters] == ["undecodable", "undecodable"]
    assert "undecodable" in app.run("dead", "list", "tasks").stdout
    shown = app.run("dead", "show", "tasks", letters[0]["id"]).stdout
    assert "\\x1b[31mno json" in shown
    assert "\x1b" not in shown
    assert app.json("dead", "show", "tasks", letters[0]["id"])["body"] == "\x1b[31mno json"
    assert app.json("dead", "replay", "tasks", letters[0]["id"]) == {"replayed": []}
    assert (
        "ids and --all"
        in app.run("dead", "delete", "tasks", letters[0]["id"], "--all", code=2).stderr
    )
    assert "no ids (name them, or say --all" in app.run("dead", "delete", "tasks", code=2).stderr
    assert (
        "delete 2 dead letters? (nobody to ask here: say --yes)"
        in app.run("dead", "delete", "tasks", "--all", code=2).stderr
    )
    assert app.json("dead", "delete", "tasks", letters[0]["id"]) == {"deleted": 1}
    assert app.json("dead", "delete", "tasks", "--all") == {"deleted": 1}
    assert app.json("dead", "list", "tasks") == []


def test_a_dead_task_can_be_replayed(app: App) -> None:
    app.write(
        "other.py",
        "from machinery_py import Server, Signature\nserver = Server()\n"
        "if __name__ == '__main__':\n    print(server.send_task(Signature.of('add', 1, 2)).uuid)\n",
    )
    uuid = app.python("other.py")
    # A worker that does not know the task gives up at once.
    app.start("worker", "other", "--no-banner", MACHINERY_UNREGISTERED_TIMEOUT="0")
    wait_until(lambda: app.json("dead", "list", "tasks"), HANG)

    app.running[0].stop()
    assert app.json("dead", "replay", "tasks", "--all") == {"replayed": [uuid]}
    app.run(*BURST)

    assert app.state(uuid) == "SUCCESS"
