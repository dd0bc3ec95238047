"""The way from a signature to a message: what is counted from the sending, and what a follow-up inherits."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

import pytest

from machinery_py import NoRetry, Server, Signature, TaskFailed, chain, chord, group
from machinery_py.settlement.base import Submission
from machinery_py.signature import HEADER_EXPIRES
from machinery_py.testing import Harness


class Flow:
    """Tasks with a manual clock; `published` has every signature as the pre-publish handler saw it."""

    def __init__(self) -> None:
        self.server = Server("memory://")
        self.published: list[Signature[Any]] = []
        self.server.set_pre_publish_handler(self.published.append)
        self.work = self.server.register_task("work", lambda *_: None)
        self.late = self.server.register_task("late", lambda *_: None)
        self.fail = self.server.register_task("fail", self._fail)
        self.harness = Harness(self.server)

    def _fail(self, *_: object) -> None:
        raise NoRetry("broken")

    def drain(self) -> None:
        self.harness.drain(raise_failures=False)

    def sent(self, name: str) -> Signature[Any]:
        """The last signature of that name that was published."""
        return [one for one in self.published if one.name == name][-1]


@pytest.fixture
def flow() -> Iterator[Flow]:
    flow = Flow()
    with flow.harness:
        yield flow
    flow.server.close()


# Delay and expiry


@pytest.mark.parametrize("place", ["chain", "group", "member", "chord", "chord failed", "then", "catch"])
def test_delay_and_expiry_of_a_later_step_count_from_its_sending(flow: Flow, place: str) -> None:
    late = flow.late.options(delay=60, expires=dt.timedelta(minutes=2)).partial()
    work, fail = flow.work, flow.fail
    step = {
        "chain": lambda: chain(work.signature(), late),
        "group": lambda: chain(work.signature(), group(late, work.partial())),
        "member": lambda: group(chain(work.signature(), late)),
        "chord": lambda: chord(group(work.signature(), work.signature()), late),
        "chord failed": lambda: chord(group(fail.signature(), work.signature()), work.partial().catch(late)),
        "then": lambda: work.signature().then(late),
        "catch": lambda: fail.signature().catch(late),
    }[place]()
    flow.server.send(step)
    flow.harness.advance(days=1)  # the first step waits for a day

    flow.drain()

    found, now = flow.sent("late"), flow.server.now()
    assert found.eta == now + dt.timedelta(minutes=1)
    assert found.headers == {HEADER_EXPIRES: repr((now + dt.timedelta(minutes=2)).timestamp())}
    flow.harness.advance(seconds=60)
    flow.drain()
    assert flow.server.result(found.uuid).get(timeout=0) is None


def test_a_step_that_comes_after_its_expiry_is_not_run(flow: Flow) -> None:
    result = chain(flow.work.signature(), flow.late.options(delay=60, expires=30).partial()).send()
    flow.harness.advance(days=1)
    flow.drain()
    flow.harness.advance(seconds=60)
    flow.drain()
    with pytest.raises(TaskFailed, match="expired"):
        result.get(timeout=0)


def test_a_retry_does_not_lengthen_the_expiry(flow: Flow) -> None:
    flaky = flow.server.task("flaky", retries=9, backoff=[40])(_away)
    result = flaky.options(expires=100).send()
    first = flow.sent("flaky").headers[HEADER_EXPIRES]
    for _ in range(4):
        flow.drain()
        flow.harness.advance(seconds=40)

    assert [one.headers[HEADER_EXPIRES] for one in flow.published] == [first] * 4
    with pytest.raises(TaskFailed, match="expired"):
        result.get(timeout=0)


def test_a_retry_of_what_a_go_worker_sent_counts_nothing_anew(flow: Flow) -> None:
    flaky = flow.server.task("flaky", retries=1, backoff=[0])(_away)
    by_go = flaky.options(delay=60, expires=60).signature().with_uuid().replace(routing_key="machinery_tasks")
    flow.server.engine.store.submit(Submission(token="go", messages=[flow.server.engine.message(by_go)]))

    flow.drain()

    assert [set(one.headers) for one in flow.published] == [{"machinery_run", "machinery_attempt"}]


def _away() -> None:
    raise ConnectionError("away")
