"""Result backends that keep what Go keeps: the rest is refused in words, and all tasks run."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from machinery_py import Config, Server, TaskFailed, chain, chord, group
from machinery_py.errors import MachineryError, Unsupported
from machinery_py.tasks.states import TaskState
from machinery_py.testing.waiting import HANG, wait_until

_numbers = itertools.count(1)

ADVICE = r"keeps no .* \(put the results into Redis, PostgreSQL, MongoDB or SQLite"


@pytest.fixture(params=["amqp", "memcache"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    if request.param == "amqp":
        backend = request.getfixturevalue("amqp_url")
    else:
        backend = request.getfixturevalue("empty_memcached").url
    server = Server(Config(broker=f"memory://refusals-{next(_numbers)}", result_backend=backend))
    yield server
    server.close()


def _add(*numbers: int) -> int:
    return sum(numbers)


def test_what_the_results_cannot_keep_is_refused_in_words(server: Server) -> None:
    add = server.register_task("add", _add)
    alone = server.task("alone", unique=True)(_add)
    sent = add.options(delay=3600.0).send(1, 2)
    flow = server.send_chain(chain(add.options(delay=3600.0).signature(1), add.partial(2)))
    workflow = server.workflow(flow.workflow)

    refused: list[Callable[[], object]] = [
        lambda: alone.send(1),
        sent.revoke,
        lambda: server.revoke([sent.uuid]),
        lambda: server.control.revoke(sent.uuid),
        workflow.cancel,
        workflow.retry,
        server.schedules.list,
        lambda: server.schedules.add("* * * * *", "tick", add.signature(1)),
    ]
    for call in refused:
        with pytest.raises(Unsupported, match=ADVICE):
            call()
    for call in (server.inspect.tasks, server.inspect.history):
        with pytest.raises(Unsupported, match="cannot list the tasks.*PostgreSQL"):
            call()

    assert not workflow.is_cancelled
    assert sent.get_state().state == "PENDING"
    assert [one.delayed for one in server.inspect.queues()] == [2]  # nothing was sent


def test_unique_call_is_sent_when_it_says_that_it_is_not(server: Server) -> None:
    alone = server.task("alone", unique=True)(_add)

    with server.new_worker(concurrency=1):
        assert alone.options(unique=False).send(1, 2).get(timeout=HANG) == 3


@pytest.mark.parametrize("options", [{"unique_until": "start"}, {"on_duplicate": "replace"}])
def test_unique_call_runs_that_was_sent_when_its_key_was_kept(
    server: Server, options: dict[str, Any]
) -> None:
    before = Server(Config(broker=server.config.broker))
    sent = before.task("add", unique=True, **options)(_add).send(1, 2)
    server.register_task("add", _add)

    with server.new_worker(concurrency=1):
        wait_until(lambda: any(one.is_finished for one in _states(server, sent.uuid)))
    assert [one.error for one in _states(server, sent.uuid)] == [""]
    before.close()


def _states(server: Server, uuid: str) -> list[TaskState]:
    return list(server.backend.get_states([uuid]).values())


def test_worker_runs_all_the_rest_and_says_once_what_it_cannot(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="machinery_py")
    add = server.register_task("add", _add)
    server.task("alone", unique=True)(_add)
    server.register_periodic_task("* * * * * *", "tick", add.signature(1))
    tried: list[int] = []

    @server.task(retries=2, backoff=[0.01])
    def shaky() -> int:
        tried.append(1)
        if len(tried) < 3:
            raise ValueError("not yet")
        return len(tried)

    @server.task
    def broken() -> None:
        raise ValueError("on purpose")

    with server.new_worker(concurrency=2):
        assert chain(add.signature(1), add.partial(2)).send().get(timeout=HANG) == 3
        assert group(add.signature(n) for n in range(3)).send().get(timeout=HANG) == [0, 1, 2]
        members = group(add.signature(n) for n in range(20))
        assert chord(members, add.partial()).send().get(timeout=HANG) == 190
        assert shaky.send().get(timeout=HANG) == 3
        failed = chord([broken.signature(), add.signature(1)], add.partial()).send()
        with pytest.raises(TaskFailed, match="on purpose"):
            failed.get(timeout=HANG)
        # Maintenance has looked for revocations by now, if it does so at all.
        wait_until(lambda: "no schedule will be sent by this worker" in caplog.text)

    complaints = [one.getMessage() for one in caplog.records if "keeps no" in one.getMessage()]
    assert [one.partition(":")[0] for one in complaints] == [
        "no call of alone can be sent",
        "no schedule will be sent by this worker",
    ]


def test_purged_tasks_fail_where_none_can_be_revoked(server: Server) -> None:
    add = server.register_task("add", _add)
    purged, steps = add.send(1), chain(add.signature(1), add.partial(2)).send()

    assert server.inspect.purge(server.config.default_queue) == 2

    for result in (purged, steps):
        with pytest.raises(MachineryError, match="its message was deleted from its queue"):
            result.get(timeout=HANG)
    with server.new_worker(concurrency=1):
        assert add.send(4).get(timeout=HANG) == 4
