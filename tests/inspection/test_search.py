"""server.inspect: search, errors, history, deletion, and what is known of one task."""

from __future__ import annotations

import base64
import datetime as dt
import functools

import pytest

from machinery_py import ArgumentError, Config, Group, Server, Signature, State, chord
from machinery_py.bounds import in_steps
from machinery_py.inspection import ChildTask, TaskPage
from machinery_py.testing import Harness
from tests.support.apps import Bench, bench

__all__ = ["bench"]


def uuids_of(page: TaskPage) -> list[str]:
    return [one.task_uuid for one in page.tasks]


def test_search_finds_by_all_that_a_state_says(bench: Bench) -> None:
    failed = bench.fail.send("Straße 7")
    added = bench.add.options(queue="mail").send(40, 2)
    bench.drain()
    bench.harness.clock.advance(minutes=10)
    waiting = bench.note.send("Straße")
    search = bench.server.inspect.search

    everything = [waiting.uuid, added.uuid, failed.uuid]
    assert uuids_of(search()) == everything
    assert uuids_of(search(state=["failed", State.PENDING])) == [waiting.uuid, failed.uuid]
    assert uuids_of(search(name="add", state="done")) == [added.uuid]
    assert uuids_of(search(queue="mail")) == [added.uuid]
    assert uuids_of(search(worker=bench.server.result(added.uuid).get_state().worker)) == [
        added.uuid,
        failed.uuid,
    ]
    # In the error, in a result, in an argument of a kept message; a waiting one is in the broker.
    assert uuids_of(search(text="STRASSE")) == [failed.uuid]
    assert uuids_of(search(text="valueerror")) == [failed.uuid]
    assert uuids_of(search(text="42")) == [added.uuid]
    assert uuids_of(search(since=60)) == [waiting.uuid]
    assert uuids_of(search(until=60)) == [added.uuid, failed.uuid]
    moment = bench.server.now()
    assert uuids_of(search(since=moment, until=moment)) == [waiting.uuid]
    with pytest.raises(ArgumentError, match="has no time zone"):
        search(since=dt.datetime(2026, 1, 1))  # that is the point


def test_cursor_goes_on_where_the_page_ended(bench: Bench) -> None:
    sent = [bench.note.send(number).uuid for number in range(7)]
    search = bench.server.inspect.search
    first = search(limit=3)
    late = bench.note.send("late")

    second = search(limit=3, cursor=first.cursor)
    last = search(limit=3, cursor=second.cursor)

    assert uuids_of(first) + uuids_of(second) + uuids_of(last) == sent[::-1]
    assert last.cursor == ""
    assert uuids_of(search(limit=1)) == [late.uuid]
    some = [search(limit=3, queue="machinery_tasks")]
    some.append(search(limit=3, queue="machinery_tasks", cursor=some[0].cursor))
    assert [uuid for page in some for uuid in uuids_of(page)] == [late.uuid, *sent[:1:-1]]
    everything = search(limit=8)
    assert (len(everything.tasks), everything.cursor) == (8, "")


@pytest.mark.parametrize("text", ["x", "é", "MQ==", base64.b64encode(b"-1 a").decode(), "A" * 99])
def test_spoilt_cursor_is_refused(bench: Bench, text: str) -> None:
    with pytest.raises(ArgumentError, match="no cursor"):
        bench.server.inspect.search(cursor=text)


def test_search_ends_when_its_time_is_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("machinery_py.backends.rows.LOOK", 4)
    for number in range(10):
        bench.note.send(number)
    rare = bench.add.send(1, 1)
    for number in range(7):
        bench.note.send(number)
    inspect = bench.server.inspect

    pages = [inspect.search(name="add", within=0.0)]
    while pages[-1].cursor:
        pages.append(inspect.search(name="add", within=0.0, cursor=pages[-1].cursor))

    assert [uuid for page in pages for uuid in uuids_of(page)] == [rare.uuid]
    assert [page.looked for page in pages] == [4, 4, 4, 4, 2]
    assert [one.task_uuid for one in inspect.tasks(name="add")] == [rare.uuid]
    bench.drain()
    bench.fail.send("x")
    bench.drain()
    assert inspect.errors(within=0.0).complete is False
    assert inspect.errors().complete is True


def test_errors_are_grouped_by_task_and_type(bench: Bench) -> None:
    def lose() -> None:
        raise OSError("away")

    bench.server.register_task("lose", lose)
    begun_at = bench.server.now()
    bench.fail.send("first")
    bench.server.send_task(Signature.of("lose").replace(routing_key="mail"))
    bench.drain()
    bench.harness.clock.advance(minutes=5)
    last = bench.fail.send("last")
    bench.drain()

    summary = bench.server.inspect.errors()
    fails, loses = summary.groups

    assert (summary.looked, summary.complete) == (3, True)
    assert (fails.name, fails.error_type, fails.count) == ("fail", "ValueError", 2)
    assert (fails.uuid, fails.error, fails.queue) == (last.uuid, "last", "machinery_tasks")
    assert (fails.first, fails.last) == (begun_at, begun_at + dt.timedelta(minutes=5))
    assert (loses.name, loses.error_type, loses.queue) == ("lose", "OSError", "mail")
    assert [one.name for one in bench.server.inspect.errors(queue="mail").groups] == ["lose"]
    assert [one.count for one in bench.server.inspect.errors(name="fail", since=60).groups] == [1]


def test_history_counts_by_steps(bench: Bench) -> None:
    for _ in range(2):
        bench.add.send(1, 1)
        bench.fail.send("x")
        bench.drain()
        bench.harness.clock.advance(minutes=2)

    first, second = bench.server.inspect.history(seconds=600, step=60)

    assert second.at - first.at == dt.timedelta(minutes=2)
    assert (first.at.timestamp() % 60, first.queue) == (0, "machinery_tasks")
    assert {(one.succeeded, one.failed) for one in (first, second)} == {(1, 1)}
    assert len(bench.server.inspect.history(seconds=130)) == 1


def test_only_finished_tasks_are_deleted(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    by_two = functools.partial(in_steps, most=2)
    monkeypatch.setattr("machinery_py.inspection.inspector.in_steps", by_two)
    over = [bench.add.send(number, 1).uuid for number in range(3)]
    bench.drain()
    waiting = bench.add.send(1, 1)
    inspect = bench.server.inspect

    assert sorted(inspect.delete([*over, waiting.uuid, "nobody"])) == sorted(over)
    assert uuids_of(inspect.search()) == [waiting.uuid]


def test_tries_before_the_last_are_told(bench: Bench) -> None:
    outcomes = [ValueError("one " * 100), OSError("two")]

    def flaky(text: str) -> str:
        if outcomes:
            raise outcomes.pop(0)
        return text

    task = bench.server.task(retries=3)(flaky)
    sent = task.send("hello")
    begun_at = bench.server.now()
    bench.drain()
    waiting = bench.server.inspect.task(sent.uuid)
    bench.harness.advance(minutes=5)
    bench.drain()
    bench.harness.advance(minutes=5)
    bench.drain()
    report = bench.server.inspect.task(sent.uuid)

    assert [one.number for one in waiting.attempts] == [1]
    assert report.state.state is State.SUCCESS
    first, second = report.attempts
    assert (first.number, first.started_at, first.ended_at) == (1, begun_at, begun_at)
    assert (first.error_type, len(first.error.encode()) <= 200) == ("ValueError", True)
    assert (second.number, second.worker) == (2, report.state.worker)
    assert (second.error_type, second.error) == ("OSError", "two")
    assert report.signature is not None
    assert [arg.value for arg in report.signature.args] == ["hello"]


def test_task_knows_what_follows_it(bench: Bench) -> None:
    step = bench.add.signature(1, 1).then(bench.note.signature()).catch(bench.note.signature())
    bench.server.send_task(step.replace(uuid="task_parent"))

    report = bench.server.inspect.task("task_parent")

    assert report.children == [
        ChildTask(when="success", name="note", uuid=report.children[0].uuid),
        ChildTask(when="error", name="note", uuid=report.children[1].uuid),
    ]
    assert (report.group, list(report.members), list(report.attempts)) == (None, [], [])


def test_member_knows_its_group(bench: Bench) -> None:
    members = [bench.add.signature(1, number).replace(uuid=f"task_{number}") for number in (2, 1)]
    bench.server.send_chord(chord(Group(members), bench.note.signature()))

    report = bench.server.inspect.task("task_1")

    assert [(one.when, one.name) for one in report.children] == [("chord", "note")]
    assert report.group is not None
    assert list(report.group.task_uuids) == ["task_2", "task_1"]
    assert [one.task_uuid for one in report.members] == ["task_2", "task_1"]


def test_large_task_is_tried_again_without_its_history() -> None:
    server = Server(Config(broker="memory://", max_message_size=3000))
    task = server.task(retries=9)(_fail_with)
    with Harness(server) as harness:
        sent = task.send("x" * 500)
        while harness.drain(raise_failures=False):
            harness.advance(minutes=30)

        state = sent.get_state()
        assert (state.state, state.attempt, state.error[:3]) == (State.FAILURE, 10, "xxx")
    server.close()


def _fail_with(text: str) -> None:
    raise ValueError(text * 5)
