"""The JSON API: what each route tells and does, on stores and with workers that are real."""

from __future__ import annotations

import datetime as dt
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from machinery_py import Config, Server, Signature, chord, current_task, group
from machinery_py.backends.base import Change
from machinery_py.brokers.base import Message
from machinery_py.dashboard.routes import ROUTES
from machinery_py.tasks.signature import Arg
from machinery_py.tasks.states import State, TaskState
from machinery_py.testing.waiting import HANG, wait_until
from machinery_py.wire.signatures import encode_signature
from tests.dashboard.site import Site, site_of
from tests.support.apps import Bench, bench

__all__ = ["bench"]

HOSTILE = "<script>alert(1)</script>\u202e\x00'\"&${x}{{x}}"


@pytest.fixture
def site(bench: Bench) -> Iterator[Site]:
    with site_of(bench.server) as site:
        yield site


# What is seen


def test_tasks_are_filtered_and_paged(bench: Bench, site: Site) -> None:
    failed = [bench.fail.send(f"no {number}").uuid for number in range(5)]
    bench.drain()
    bench.add.send(1, 2)

    first = site.get("tasks", state=["failure", "RETRY"], name="fail", since="60", limit=3)
    second = site.get("tasks", state="FAILURE", name="fail", limit=3, cursor=first["cursor"])
    found = site.get("tasks", text="NO 3")
    later = site.get("tasks", since=(dt.datetime.now(dt.UTC) + dt.timedelta(days=1)).isoformat())

    assert sorted(one["uuid"] for one in first["tasks"] + second["tasks"]) == sorted(failed)
    assert first["cursor"] and not second["cursor"]
    assert [one["error"] for one in found["tasks"]] == ["no 3"]
    assert [one["error_type"] for one in found["tasks"]] == ["ValueError"]
    assert later["tasks"] == []


def test_task_is_told_with_its_message_and_its_workflow(bench: Bench, site: Site) -> None:
    callback = bench.note.signature("done")
    members = group(bench.add.signature(1, 2), bench.fail.signature("x"))
    sent = bench.server.send_chord(chord(members, callback))
    bench.drain()

    told = site.get("task", uuid=sent.group.results[1].uuid)

    assert told["python"] == "fail.send('x')"
    assert told["message"]["args"] == [{"name": "text", "type": "string", "value": '"x"'}]
    assert [one["name"] for one in told["children"]] == ["note"]
    assert [one["uuid"] for one in told["group"]["members"]] == [
        one.uuid for one in sent.group.results
    ]
    assert "ValueError: x" in told["traceback"]


def test_secrets_are_masked_wherever_they_have_a_name(bench: Bench, site: Site) -> None:
    def login(user: str, password: str, settings: Any, *, api_key: str) -> dict[str, str]:
        raise ValueError(user)

    task = bench.server.register_task("login", login)
    settings = {"db": [{"Passwd": "s3cret"}], "colour": "red"}
    call = task.signature("ada", "s3cret", settings, api_key="s3cret")
    sent = call.with_headers(tenant="a", Authorization="s3cret").then(call).send()
    bench.drain()
    body = b'{"token": "s3cret", "Args": [{"Name": "password", "Value": "s3cret"}]}'
    bench.server.broker.put(
        [Message(uuid="", name="", queue="machinery_tasks", body=body)], token=""
    )
    bench.drain()

    told = site.get("task", uuid=sent.uuid)
    letters = site.get("dead")

    assert [one["value"] for one in told["message"]["args"]] == [
        '"ada"',
        '"•••"',
        '{"db": [{"Passwd": "•••"}], "colour": "red"}',
        '"•••"',
    ]
    assert told["message"]["headers"]["Authorization"] == '"•••"'
    assert told["message"]["headers"]["tenant"] == '"a"'
    assert "api_key='•••'" in told["python"]
    assert letters[0]["body"].count("•••") == 2
    listed = site.get("tasks")["tasks"]
    assert {one["args"] for one in listed if one["uuid"] == sent.uuid} == {
        'user="ada", password="•••", settings={"db": [{"Passwd": "•••"}], "colour": "red"}, '
        'api_key="•••"'
    }
    assert "s3cret" not in json.dumps([told, letters, listed])


def test_mask_of_the_user_decides_what_is_shown(bench: Bench) -> None:
    sent = bench.fail.send("4111 1111")
    bench.drain()
    asked: list[tuple[str, Any]] = []

    def mask(name: str, value: Any) -> Any:
        asked.append((name, value))
        return "card" if name == "text" else value

    with site_of(bench.server, mask=mask) as site:
        told = site.get("task", uuid=sent.uuid)

    assert told["message"]["args"][0]["value"] == '"card"'
    assert ("text", "4111 1111") in asked


@pytest.mark.parametrize(
    "value",
    [
        HOSTILE,
        "\ud800",
        10**400,
        float("nan"),
        [[[[]]]],
        {"__proto__": {"a": 1}, "a" * 5000: "b" * 100_000},
        b"\xff\x00",
    ],
)
def test_values_that_are_hostile_are_shown_as_text(bench: Bench, site: Site, value: Any) -> None:
    state = TaskState(
        task_uuid=f"task_{HOSTILE}",
        task_name=HOSTILE,
        state=State.FAILURE,
        results=[Arg(type=HOSTILE, value=value, name=HOSTILE)],
        error=f"{HOSTILE}\ud800",
        error_type=HOSTILE,
        traceback=f"\udfff{HOSTILE}",
        queue=HOSTILE,
        worker=HOSTILE,
        created_at=bench.server.now(),
        message=encode_signature(Signature(name=HOSTILE, args=[Arg(type="json", value=HOSTILE)])),
    )
    bench.server.backend.apply([Change(key=state.task_uuid, states=[state])])

    [row] = site.get("tasks")["tasks"]
    told = site.get("task", uuid=state.task_uuid)

    assert (row["uuid"], row["name"], row["queue"]) == (state.task_uuid, HOSTILE, HOSTILE)
    assert isinstance(row["result"], str) and len(row["result"]) <= 300
    assert isinstance(told["results"][0]["value"], str)
    assert len(told["results"][0]["value"]) <= 20_000
    assert HOSTILE in told["error"]


def test_history_and_errors_count_what_ended(bench: Bench, site: Site) -> None:
    for _ in range(3):
        bench.fail.send("x")
    bench.add.send(1, 2)
    bench.drain()

    counts = site.get("history", seconds=600, step=60)
    summary = site.get("errors", since="600")

    assert sum(one["failed"] for one in counts) == 3
    assert sum(one["succeeded"] for one in counts) == 1
    assert [(one["name"], one["error_type"], one["count"]) for one in summary["groups"]] == [
        ("fail", "ValueError", 3)
    ]
    assert summary["complete"] is True


def test_backend_that_keeps_nothing_is_told_in_words() -> None:
    server = Server(Config(broker="memory://", result_backend="null"))
    with site_of(server) as site:
        refused = [
            site.request("GET", f"api/{path}")
            for path in ("tasks", "errors", "schedules", "history")
        ]

        assert site.get("overview")["trouble"] == ""
        assert site.get("queues") == []
    assert {one.status for one in refused} == {409}
    assert all("null" in one.error for one in refused)


def test_every_page_can_be_read_over_every_broker(broker_url: str) -> None:
    server = Server(Config(broker=broker_url))

    @server.task
    def fail(number: int) -> None:
        raise ValueError(str(number))

    sent = [fail.send(number) for number in range(3)]
    flow = group(fail.signature(3)).send()
    server.new_worker("web-1", concurrency=2, burst=True).launch()
    with server.new_worker("web-2", queues=["mail"]), site_of(server) as site:
        told = site.get("task", uuid=sent[0].uuid)
        why = site.get("why", uuid=sent[0].uuid)
        overview = site.get("overview")
        replies = {
            path: site.request("GET", f"api/{path}")
            for path, methods in ROUTES.items()
            if "GET" in methods and path not in ("task", "why", "worker", "workflow")
        }
        asked = site.get("worker", name="web-2")
        held = site.get("workflow", uuid=flow.workflow)
        uuids, uuid = [one.uuid for one in sent], flow.workflow
        again = site.try_post("workflows/retry", uuid=uuid)
        ended = site.try_post("workflows/cancel", uuid=uuid)
        retried = site.post("tasks/retry", uuids=uuids)
        revoked = site.try_post("tasks/revoke", uuids=uuids, terminate=True)
    server.close()

    assert (told["state"], told["message"]["args"][0]["value"]) == ("FAILURE", "0")
    assert [one["cause"] for one in why] == ["ended"]
    assert (overview["trouble"], overview["workers"]["alive"]) == ("", 1)
    unlisted = {path for path, reply in replies.items() if reply.status != 200}
    assert unlisted == (
        {"tasks", "errors", "history", "workflows", "schedules"} if "amqp" in broker_url else set()
    )
    assert all("Redis, PostgreSQL" in replies[path].error for path in unlisted)
    assert asked["stats"]["host"] and asked["queues"] == [{"name": "mail", "weight": 0.0}]
    assert retried["done"] == 3
    assert (held["name"], held["state"], held["steps"][0]["error"]) == ("fail ×1", "FAILURE", "3")
    if "amqp" in broker_url:
        assert [one.status for one in (again, ended, revoked)] == [409] * 3
        assert all("Redis, PostgreSQL" in one.error for one in (again, ended, revoked))
    else:
        assert [one.json["done"] for one in (again, ended, revoked)] == [1, 1, 3]
        [row] = replies["workflows"].json["workflows"]
        assert row == {key: held[key] for key in row}


def test_schema_has_every_route_and_every_record(site: Site) -> None:
    schema = site.get("schema")

    assert len(schema["routes"]) == 34
    assert all(one["help"] for one in schema["routes"])
    assert {"TaskRow", "TaskDetail", "Overview", "Problem"} <= schema["definitions"].keys()


# What is done


def test_queue_is_paused_and_resumed(bench: Bench, site: Site) -> None:
    site.post("queues/pause", queue="machinery_tasks")
    assert bench.server.broker.paused() == {"machinery_tasks"}

    site.post("queues/resume", queue="machinery_tasks")
    assert not bench.server.broker.paused()


def test_limit_of_an_unknown_task_is_not_set(site: Site) -> None:
    refused = site.try_post("limits/change", name="ad", option="rate", value="5/s")

    assert refused.status == 400
    assert "no task 'ad' is known here" in refused.error
    assert site.get("limits") == []


def test_queue_that_has_grown_is_not_purged(bench: Bench, site: Site) -> None:
    for _ in range(12):
        bench.add.send(1, 2)
    bench.add.options(delay=60).send(1, 2)

    refused = site.try_post("queues/purge", queue="machinery_tasks", expected=2)
    done = site.post("queues/purge", queue="machinery_tasks", expected=refused.json["count"] - 10)

    assert (refused.status, refused.json["count"]) == (409, 13)
    assert done["done"] == 13
    assert bench.server.inspect.queues()[0].waiting == 0


def test_task_gets_the_signal_that_it_waits_for(bench: Bench, site: Site) -> None:
    @bench.server.task
    def approve(order: int) -> Any:
        return current_task().wait_for("approval", timeout=dt.timedelta(days=7)), order

    sent = approve.send(7)
    bench.drain()
    shown = site.get("task", uuid=sent.uuid)
    assert (shown["waits_for"], shown["message"]["args"][0]["value"]) == ("approval", "7")

    [why] = [one for one in site.get("why", uuid=sent.uuid) if one["cause"] == "signal"]
    assert why["text"].startswith("it waits for signal 'approval' until ")
    assert "signal" in why["hint"]

    signal = {"uuid": sent.uuid, "name": "approval", "value": {"by": "ada"}, "key": "click"}
    assert site.post("tasks/signal", **signal)["done"] == 1
    assert site.post("tasks/signal", **signal)["done"] == 0
    bench.drain()
    assert sent.get(timeout=HANG) == ({"by": "ada"}, 7)
    assert site.get("task", uuid=sent.uuid)["waits_for"] == ""


def test_tasks_are_retried_revoked_and_deleted_by_uuid(bench: Bench, site: Site) -> None:
    failed, waiting = bench.fail.send("x").uuid, ""
    bench.drain()
    waiting = bench.add.send(1, 2).uuid

    assert site.post("tasks/retry", uuids=[failed, waiting])["done"] == 1
    assert site.post("tasks/revoke", uuids=[waiting])["done"] == 1
    again = site.post("tasks/revoke", uuids=[waiting, "task_unheard-of"])
    assert (again["done"], again["skipped"]) == (1, 1)  # the other may be on its way
    assert bench.server.result(waiting).get_state().error == "revoked"
    assert site.post("tasks/delete", uuids=[failed, waiting]) == {
        "done": 1,
        "skipped": 1,
        "cursor": "",
        "looked": 2,
    }
    assert [one["uuid"] for one in site.get("tasks")["tasks"]] == [failed]


def in_steps(site: Site, path: str, **body: Any) -> list[dict[str, Any]]:
    """Call again with the cursor until there is none, as the page does."""
    steps: list[dict[str, Any]] = [site.post(path, **body)]
    while steps[-1]["cursor"]:
        steps.append(site.post(path, **body, cursor=steps[-1]["cursor"]))
        assert len(steps) < 100
    return steps


def test_all_that_a_filter_finds_is_changed_step_by_step(tmp_path: Path) -> None:
    server = Server(Config(broker=f"sqlite:///{tmp_path}/m.db"))

    @server.task
    def fail(number: int) -> None:
        raise ValueError("odd" if number % 2 else "even")

    group(fail.signature(number) for number in range(1400)).send()
    server.new_worker(concurrency=4, burst=True).launch()
    with site_of(server) as site:
        counted = in_steps(site, "tasks/count", filter={"text": "odd"}, action="retry")
        retried = in_steps(site, "tasks/retry", filter={"text": "odd"})
        again = in_steps(site, "tasks/retry", filter={"text": "odd"})
        deleted = in_steps(site, "tasks/delete", filter={"state": ["FAILURE"]})
        revoked = in_steps(site, "tasks/revoke", filter={"name": "fail"})
        left = site.get("tasks", state=["PENDING"])
    server.close()

    assert sum(one["count"] for one in counted) == 700
    assert (sum(one["done"] for one in retried), len(retried) > 1) == (700, True)
    assert sum(one["done"] for one in again) == 0
    assert sum(one["done"] for one in deleted) == 700
    assert sum(one["done"] for one in revoked) == 700
    assert left["tasks"] == []


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("tasks/retry", {}),
        ("tasks/retry", {"uuids": ["a"], "filter": {}}),
        ("tasks/retry", {"uuids": ["a"] * 1001}),
        ("tasks/retry", {"filter": {"state": ["SUCCESS"]}}),
        ("tasks/revoke", {"filter": {"state": ["FAILURE"]}}),
        ("tasks/delete", {"filter": {"state": ["PENDING"]}}),
        ("tasks/retry", {"filter": {}, "cursor": "spoilt"}),
        ("tasks/count", {"filter": {}, "action": "purge"}),
    ],
)
def test_bulk_change_that_makes_no_sense_is_refused(
    site: Site, path: str, body: dict[str, Any]
) -> None:
    assert site.try_post(path, **body).status == 400


def test_dead_letters_are_replayed_and_deleted(bench: Bench, site: Site) -> None:
    bodies = [b"{", encode_signature(Signature(name="add", uuid="task_7")), b"\xff\x00<script>"]
    messages = [Message(uuid="", name="", queue="machinery_tasks", body=one) for one in bodies]
    bench.server.broker.put(messages, token="")
    bench.drain()

    letters = site.get("dead", queue="machinery_tasks")
    ids = [one["id"] for one in letters]
    replayed = site.post("dead/replay", ids=ids)
    deleted = site.post("dead/delete", ids=[one["id"] for one in site.get("dead")])

    assert sorted(one["body"] for one in letters)[-1] == "{"
    assert replayed["done"] + replayed["skipped"] == len(ids)
    assert deleted["done"] == replayed["skipped"] == 2
    assert site.try_post("dead/delete", ids=["none"]).status == 404


def test_schedules_are_paused_resumed_and_run(bench: Bench, site: Site) -> None:
    bench.server.schedules.add("@daily", "digest", bench.note.signature("news"))

    site.post("schedules/pause", name="digest")
    assert site.get("schedules")[0]["paused"] is True
    site.post("schedules/resume", name="digest")
    site.post("schedules/run", name="digest")

    bench.drain()
    assert bench.calls == [("news",)]
    assert site.get("schedules")[0]["sent"] == 1
    assert site.try_post("schedules/run", name="none").status == 404


def test_worker_whose_name_is_a_pattern_is_not_taken_for_the_fleet() -> None:
    server = Server("memory://")
    with server.new_worker("*"), server.new_worker("web-1"), site_of(server) as site:
        for path, more in (("workers/shutdown", {}), ("workers/concurrency", {"concurrency": 9})):
            refused = site.try_post(path, name="*", **more)
            assert refused.status == 400
        assert {one["name"] for one in site.get("workers")} == {"*", "web-1"}
        assert site.get("worker", name="web-1")["stats"]["concurrency"] != 9
    server.close()


def test_worker_tells_what_it_does_and_is_steered(redis_url: str) -> None:
    server = Server(Config(broker=redis_url))
    go = threading.Event()

    @server.task
    def hold() -> None:
        go.wait(HANG)

    held = hold.send()
    with server.new_worker("web-1", concurrency=2), site_of(server) as site:
        wait_until(lambda: held.get_state().state is State.STARTED)

        [listed] = site.get("workers")
        told = site.get("worker", name="web-1")
        site.post("workers/concurrency", name="web-1", concurrency=5)
        missing = site.get("worker", name="none")
        refused = site.try_post("workers/concurrency", name="none", concurrency=5)

        assert listed["name"] == "web-1" and listed["age"] < HANG
        assert (told["stats"]["concurrency"], told["trouble"]) == (2, "")
        assert [one["uuid"] for one in told["active"]] == [held.uuid]
        assert [one["name"] for one in told["queues"]] == ["machinery_tasks"]
        assert site.get("worker", name="web-1")["stats"]["concurrency"] == 5
        assert missing["stats"] is None and "none" in missing["trouble"]
        assert refused.status == 409
        go.set()
        site.post("workers/shutdown", name="web-1")
        wait_until(lambda: not site.get("workers"))
    server.close()
