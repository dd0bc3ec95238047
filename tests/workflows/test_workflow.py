"""A workflow that was sent: its steps, its end, its cancelling and its retry."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from machinery_py import (
    ArgumentError,
    Replace,
    Server,
    StateNotFound,
    TaskFailed,
    WorkflowError,
    chain,
    chord,
    current_task,
    group,
)
from machinery_py.tasks.lineage import lasts_of
from machinery_py.tasks.signature import HEADER_LAST, Signature, Step
from machinery_py.tasks.states import State
from machinery_py.testing import Harness
from machinery_py.testing.waiting import HANG, wait_until


class Shop:
    """Tasks that fail while their name stands in `broken`; `told`: errors, `runs`: calls."""

    def __init__(self) -> None:
        self.server = Server("memory://")
        self.broken: set[str] = set()
        self.told: list[str] = []
        self.runs: list[str] = []
        task = self.server.register_task
        self.fetch = task("fetch", self._fetch)
        self.merge = task("merge", self._merge)
        self.tell = task("tell", self._tell)
        self.harness = Harness(self.server)

    def _fetch(self, name: str, *_: Any) -> str:
        self.runs.append(name)
        if name in self.broken:
            raise ConnectionError("refused")
        return name

    def _merge(self, *names: str) -> str:
        text = "+".join(names)
        self.runs.append(text)
        if "merge" in self.broken:
            raise ValueError("no merging")
        return text

    def _tell(self, error: str) -> None:
        self.told.append(error)

    def drain(self) -> None:
        self.harness.drain(raise_failures=False)

    def fetches(self, *names: str) -> list[Step[Any]]:
        return [self.fetch.signature(name) for name in names]


@pytest.fixture
def shop() -> Iterator[Shop]:
    shop = Shop()
    with shop.harness:
        yield shop


def summary(shop: Shop, uuid: str) -> list[tuple[str, dict[str, int], int]]:
    steps = shop.server.workflow(uuid).tree()
    return [(one.name, dict(one.counts), one.total) for one in steps]


def test_steps_of_a_chord_are_counted_by_state(shop: Shop) -> None:
    shop.broken = {"b"}
    result = chord(shop.fetches("a", "b", "c"), shop.merge.partial()).send()
    uuid = result.workflow
    assert summary(shop, uuid) == [("fetch", {"PENDING": 3}, 3), ("merge", {"PENDING": 1}, 1)]
    assert shop.server.workflow(uuid).state is State.PENDING

    shop.drain()
    flow = shop.server.workflow(uuid)

    assert (flow.name, flow.state) == ("fetch ×3 | merge", State.FAILURE)
    assert flow.progress == (4, 2, 4)
    fetch, merge = flow.tree()
    assert dict(fetch.counts) == {"SUCCESS": 2, "FAILURE": 1}
    assert (fetch.error, fetch.error_type) == ("refused", "ConnectionError")
    assert (fetch.parents, fetch.children) == ([], [merge.uuid])
    assert (merge.parents, merge.children) == ([fetch.uuid], [])
    assert fetch.tasks[0].state is State.FAILURE
    assert fetch.started_at is not None and fetch.finished_at is not None


def test_workflow_is_found_by_each_uuid_in_it(shop: Shop) -> None:
    result = chain(
        shop.fetch.signature("a"), group(shop.fetches("b", "c")), shop.merge.partial()
    ).send()
    shop.drain()

    first, middle, last = result.steps
    uuids = [first.uuid, middle.uuid, middle[1].uuid, last.uuid, result.uuid, result.workflow]
    assert {shop.server.workflow(uuid).uuid for uuid in uuids} == {result.workflow}
    starts = [result.workflow[:12], first.uuid[:12]]
    assert {shop.server.workflow(uuid).uuid for uuid in starts} == {result.workflow}


def test_plain_task_has_no_workflow(shop: Shop) -> None:
    result = shop.fetch.send("a")
    with pytest.raises(StateNotFound, match="sent outside of a workflow"):
        shop.server.workflow(result.uuid)
    with pytest.raises(StateNotFound):
        shop.server.workflow("flow_1")


def test_retried_chord_keeps_the_results_it_has(shop: Shop) -> None:
    shop.broken = {"b"}
    last = shop.fetch.partial("after")
    result = chain(
        group(shop.fetches("a", "b", "c")), shop.merge.partial().catch(shop.tell.partial()), last
    ).send()
    shop.drain()
    with pytest.raises(TaskFailed):
        result.get(timeout=0)
    runs, shop.broken = len(shop.runs), set()

    flow = shop.server.workflow(result.workflow)
    assert len(flow.retry()) == 1
    shop.drain()

    assert shop.runs[runs:] == ["b", "a+b+c", "after"]
    flow.refresh()
    assert (flow.state, flow.progress) == (State.SUCCESS, (5, 0, 5))
    fresh = shop.server.result(result.uuid)
    assert fresh.get(timeout=0) == "after"
    assert len(shop.told) == 1
    assert flow.retry() == []


def test_retry_that_fails_again_can_be_retried(shop: Shop) -> None:
    shop.broken = {"a", "b"}
    result = chord(shop.fetches("a", "b", "c"), shop.merge.partial()).send()
    shop.drain()
    flow = shop.server.workflow(result.workflow)
    shop.broken = {"b"}
    assert len(flow.retry()) == 2
    shop.drain()
    flow.refresh()
    assert flow.state is State.FAILURE
    shop.broken = set()
    assert len(flow.retry()) == 1
    shop.drain()

    assert shop.runs.count("a+b+c") == 1
    assert shop.server.workflow(result.workflow).state is State.SUCCESS


def test_retry_mends_chords_in_chords(shop: Shop) -> None:
    shop.broken = {"b"}
    inner = chord(shop.fetches("a", "b"), shop.merge.partial())
    result = chord([inner, shop.fetch.signature("c")], shop.merge.partial()).send()
    shop.drain()
    shop.broken = set()

    flow = shop.server.workflow(result.workflow)
    assert len(flow.retry()) == 1
    shop.drain()

    assert shop.runs[-1] == "a+b+c"
    assert shop.server.workflow(result.workflow).state is State.SUCCESS


def test_retry_of_a_first_step_sends_the_group_behind_it(shop: Shop) -> None:
    shop.broken = {"first"}
    work = chain(shop.fetch.signature("first"), group(shop.fetches("a", "b")), shop.merge.partial())
    result = work.send()
    shop.drain()
    assert shop.server.workflow(result.workflow).state is State.FAILURE
    shop.broken = set()

    shop.server.workflow(result.workflow).retry()
    shop.drain()

    assert shop.server.result(result.uuid).get(timeout=0) == "a+b"


def test_group_behind_a_group_belongs_to_the_workflow_and_is_retried(shop: Shop) -> None:
    shop.broken = {"b"}
    second = group(shop.fetch.partial("x"), shop.fetch.partial("y"))
    result = chain(group(shop.fetches("a", "b")), second, shop.merge.partial()).send()
    shop.drain()
    assert shop.server.workflow(result.workflow).state is State.FAILURE
    shop.broken = set()

    assert len(shop.server.workflow(result.workflow).retry()) == 1
    shop.drain()

    assert shop.server.result(result.uuid).get(timeout=0) == "x+y"
    assert sorted(shop.runs) == ["a", "b", "b", "x", "x+y", "y"]
    assert shop.server.workflow(result.steps[1][0].uuid).uuid == result.workflow


def test_chord_that_skipped_a_member_is_not_retried_for_it(shop: Shop) -> None:
    shop.broken = {"b"}
    result = chord(shop.fetches("a", "b", "c"), shop.merge.partial(), on_failure="skip").send()
    shop.drain()

    flow = shop.server.workflow(result.workflow)
    assert (flow.state, flow.progress) == (State.SUCCESS, (4, 1, 4))
    assert flow.retry() == []


def test_cancelled_workflow_starts_nothing_more(shop: Shop) -> None:
    callback = shop.merge.partial().catch(shop.tell.partial())
    result = chain(shop.fetch.signature("a"), group(shop.fetches("b", "c")), callback).send()
    flow = shop.server.workflow(result.workflow)

    flow.cancel()
    shop.drain()

    assert shop.runs == []
    assert (flow.is_cancelled, flow.state) == (True, State.FAILURE)
    assert len(shop.told) == 1
    with pytest.raises(TaskFailed):
        result.get(timeout=0)
    flow.cancel()
    shop.drain()
    assert len(shop.told) == 1
    with pytest.raises(WorkflowError, match="was cancelled"):
        flow.retry()


def test_step_behind_a_running_one_is_revoked_when_its_turn_comes(shop: Shop) -> None:
    server, uuids = shop.server, list[str]()

    @server.task
    def running(number: int) -> int:
        server.workflow(uuids[0]).cancel()
        shop.fetch.send("child")
        return number

    result = chain(
        running.signature(1).then(shop.fetch.partial("then")),
        shop.fetch.partial("next").catch(shop.tell.partial()),
    ).send()
    uuids.append(result.workflow)
    shop.drain()

    assert shop.runs == []
    assert shop.told == ["revoked"]
    steps = server.workflow(result.workflow).tree()
    assert [dict(one.counts) for one in steps] == [{"SUCCESS": 1}, {"FAILURE": 1}]


def test_retry_is_refused_while_another_one_is_under_way(shop: Shop) -> None:
    shop.broken = {"a"}
    result = chain(shop.fetch.signature("a"), shop.merge.partial()).send()
    shop.drain()
    first, second = (shop.server.workflow(result.workflow) for _ in range(2))
    seen: list[str] = []

    def publish(_: object) -> None:
        with pytest.raises(WorkflowError, match="is being retried"):
            second.retry()
        seen.append("refused")

    submit = shop.server.app.store.submit
    shop.server.app.store.submit = lambda one: (publish(one), submit(one))[1]  # type: ignore[method-assign]
    first.retry()
    assert seen == ["refused"]


def test_record_is_gone_with_the_results(shop: Shop) -> None:
    result = group(shop.fetches("a", "b")).send()
    shop.drain()
    assert shop.server.workflow(result.workflow).state is State.SUCCESS

    shop.harness.advance(seconds=shop.server.config.results_expire_in + 61)
    shop.server.app.store.tend()

    with pytest.raises(StateNotFound):
        shop.server.workflow(result.workflow)


@pytest.mark.parametrize("size", [1_000, 4_000])
def test_record_of_a_long_chain_grows_with_its_steps_alone(shop: Shop, size: int) -> None:
    result = chain(*(shop.fetch.signature("a") for _ in range(size))).send()
    record = shop.server.backend.get_group(result.workflow)

    assert record is not None
    assert len(record.task_uuids) == 1
    assert len(record.plan) < 70 * size
    wide = group(shop.fetches(*["a"] * size)).send()
    record = shop.server.backend.get_group(wide.workflow)
    assert record is not None and len(record.plan) < 200 and len(record.task_uuids) < 70


def test_retry_behind_a_task_that_gave_way_is_refused_and_leaves_nothing_waiting(
    shop: Shop,
) -> None:
    """What failed is in a workflow of its own: without it the chord would wait for ever."""

    @shop.server.task
    def gives_way() -> str:
        raise Replace(chain(shop.fetch.signature("x"), shop.fetch.partial("ok")))

    shop.broken = {"x", "y"}
    result = chord([gives_way.signature(), shop.fetch.signature("y")], shop.merge.partial()).send()
    shop.drain()
    shop.broken = set()
    flow = shop.server.workflow(result.workflow)

    with pytest.raises(WorkflowError, match="took the place of one of its tasks"):
        flow.retry()
    flow.refresh()
    assert flow.state is State.FAILURE


def test_step_behind_a_group_that_took_a_place_belongs_to_the_workflow(shop: Shop) -> None:
    roots: list[str] = []

    @shop.server.task
    def gives_way() -> list[str]:
        raise Replace(group(shop.fetch.signature(name) for name in "ab"))

    @shop.server.task
    def after(names: list[str]) -> int:
        roots.append(current_task().signature.root)
        return len(names)

    result = chain(gives_way.signature(), after.partial()).send()
    shop.drain()

    assert roots == [result.workflow]


@pytest.mark.parametrize("is_member", [True, False])
def test_long_chain_with_a_group_or_in_one_is_refused_when_it_is_sent(
    shop: Shop, is_member: bool
) -> None:
    """In pieces, a failure would not find the members of chords that it takes along."""
    steps = [shop.fetch.signature("a"), *[shop.fetch.partial()] * 5600]
    work: Any = (
        chord([chain(*steps), shop.fetch.signature("c")], shop.merge.partial())
        if is_member
        else chain(*steps, group(shop.fetch.partial("b"), shop.fetch.partial("c")))
    )

    with pytest.raises(ArgumentError, match="Go reads 4999"):
        work.send()


def test_header_that_cannot_be_encoded_is_refused_in_words(shop: Shop) -> None:
    header = {"machinery_last": '[["task_1", 0]]\ud800'}
    with pytest.raises(ArgumentError, match="cannot be sent"):
        shop.server.send(shop.fetch.signature("a").with_headers(**header))


def test_revoked_task_sends_no_success_when_the_group_in_its_place_ends(shop: Shop) -> None:
    server, uuids = shop.server, list[str]()

    @server.task
    def revoke() -> str:
        server.revoke(uuids)
        return "b"

    @server.task
    def give_way() -> list[str]:
        raise Replace(group(shop.fetch.signature("a"), revoke.signature()))

    result = give_way.signature().then(shop.fetch.partial("then")).send()
    uuids.append(result.uuid)
    shop.drain()

    with pytest.raises(TaskFailed, match="revoked"):
        result.get(timeout=0)
    assert shop.runs == ["a"]


@pytest.mark.parametrize("run", ["-1", "1000000000", "99999999999999999999", "1.5", '"1"'])
def test_last_task_with_an_impossible_run_is_none(run: str) -> None:
    text = f'[["task_1", {run}]]'
    assert lasts_of(Signature(name="a", headers={HEADER_LAST: text})) == []
    assert lasts_of(Signature(name="a", headers={HEADER_LAST: '[["task_1", 7]]'})) == [
        ("task_1", 7)
    ]


def test_retry_says_that_the_results_of_members_are_gone() -> None:
    server = Server("memory://gone")

    @server.task
    def fetch() -> str:
        return "a"

    @server.task
    def forget() -> str:
        uuid = result.group.results[0].uuid
        wait_until(server.result(uuid).is_finished)
        server.backend.purge_state(uuid)
        return "b"

    result = chord([fetch.signature(), forget.signature()], fetch.partial().fixed()).send()
    with closing(server), server.new_worker(concurrency=2):
        with pytest.raises(TaskFailed, match="the chord's members are not there any more"):
            server.result(result.uuid).get(timeout=HANG)
        with pytest.raises(WorkflowError, match="the chord's members are not there any more"):
            server.workflow(result.workflow).retry()
