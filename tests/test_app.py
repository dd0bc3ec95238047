"""From a signature to a message: what counts from the sending, and what a follow-up inherits."""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from machinery_py import (
    Arg,
    ArgumentError,
    BrokerUnavailable,
    Config,
    MachineryError,
    NoRetry,
    PublishUnknown,
    QueueFull,
    Server,
    Signature,
    TaskFailed,
    chain,
    chord,
    current_task,
    group,
)
from machinery_py.stores.base import Submission
from machinery_py.tasks.signature import (
    HEADER_EXPIRES,
    HEADER_FAILED,
    HEADER_ORIGIN,
    HEADER_PARENT,
    HEADER_ROOT,
    Step,
)
from machinery_py.testing import Harness
from machinery_py.testing.waiting import wait_until


def without_kin(signature: Signature[Any]) -> dict[str, Any]:
    kin = (HEADER_ROOT, HEADER_PARENT, HEADER_ORIGIN, HEADER_FAILED)
    return {key: value for key, value in signature.headers.items() if key not in kin}


class Flow:
    """Tasks with a manual clock; `published`: each signature seen by the pre-publish handler."""

    def __init__(self) -> None:
        self.server = Server("memory://")
        self.published: list[Signature[Any]] = []
        self.server.set_pre_publish_handler(self.published.append)
        self.work = self.server.register_task("work", lambda *_: None)
        self.late = self.server.register_task("late", lambda *_: None)
        self.fail = self.server.register_task("fail", self._fail)
        self.parent = self.server.register_task("parent", self._parent)
        self.harness = Harness(self.server)

    def _fail(self, *_: object) -> None:
        raise NoRetry("broken")

    def _parent(self) -> None:
        self.late.send()

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


@pytest.mark.parametrize(
    "place", ["chain", "group", "member", "chord", "chord failed", "then", "catch"]
)
def test_delay_and_expiry_of_a_later_step_count_from_its_sending(flow: Flow, place: str) -> None:
    late = flow.late.options(delay=60, expires=dt.timedelta(minutes=2)).partial()
    work, fail = flow.work, flow.fail
    step = {
        "chain": lambda: chain(work.signature(), late),
        "group": lambda: chain(work.signature(), group(late, work.partial())),
        "member": lambda: group(chain(work.signature(), late)),
        "chord": lambda: chord(group(work.signature(), work.signature()), late),
        "chord failed": lambda: chord(
            group(fail.signature(), work.signature()), work.partial().catch(late)
        ),
        "then": lambda: work.signature().then(late),
        "catch": lambda: fail.signature().catch(late),
    }[place]()
    flow.server.send(step)
    flow.harness.advance(days=1)  # the first step waits for a day

    flow.drain()

    found, now = flow.sent("late"), flow.server.now()
    assert found.eta == now + dt.timedelta(minutes=1)
    assert without_kin(found) == {HEADER_EXPIRES: repr((now + dt.timedelta(minutes=2)).timestamp())}
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


def test_retry_of_a_go_task_continues_its_count(flow: Flow) -> None:
    flaky = flow.server.task("flaky", retries=1, backoff=[0])(_away)
    by_go = (
        flaky.options(delay=60, expires=60)
        .signature()
        .with_uuid()
        .replace(routing_key="machinery_tasks")
    )
    flow.server.app.store.submit(Submission(token="go", messages=[flow.server.app.message(by_go)]))

    flow.drain()

    [retried] = flow.published
    assert set(retried.headers) == {"machinery_run", "machinery_attempt", "machinery_attempts"}


# Headers that go on


TRACE = {"traceparent": "00-1", "tracestate": "a=1", "baggage": "b=2"}


@pytest.mark.parametrize(
    "place",
    [
        "chain",
        "group",
        "member",
        "chord",
        "chord behind",
        "chord failed",
        "never ran",
        "then",
        "catch",
        "sent",
        "sent async",
    ],
)
def test_trace_context_goes_on_to_what_a_task_sends(flow: Flow, place: str) -> None:
    late, work, fail = (
        flow.late.partial(),
        flow.work.options(headers=TRACE),
        flow.fail.options(headers=TRACE),
    )
    parent = flow.parent.options(headers=TRACE)
    flow.server.register_task("async_parent", _async_parent(flow))
    step = {
        "chain": lambda: chain(work.signature(), flow.work.partial(), late),
        "group": lambda: chain(work.signature(), group(late, flow.work.partial())),
        "member": lambda: group(chain(work.signature(), late)),
        "chord": lambda: chord(group(work.signature(), work.signature()), late),
        "chord behind": lambda: chain(
            work.signature(), group(flow.work.partial(), flow.work.partial()), late
        ),
        "chord failed": lambda: chord(
            group(fail.signature(), work.signature()), flow.work.partial().catch(late)
        ),
        "never ran": lambda: chord(
            group(chain(fail.signature(), flow.work.partial())), flow.work.partial().catch(late)
        ),
        "then": lambda: work.signature().then(late),
        "catch": lambda: fail.signature().catch(late),
        "sent": parent.signature,
        "sent async": lambda: Signature(name="async_parent", headers=TRACE, sender=flow.server),
    }[place]()

    flow.server.send(step)
    flow.drain()

    assert without_kin(flow.sent("late")) == TRACE


def test_declared_headers_go_on_and_ours_never_do(flow: Flow) -> None:
    server = flow.server
    server.app.config = server.config.replace(inherited_headers="tenant, x-, m")
    headers = {"tenant": "acme", "tenant_id": "7", "x-a": "1", "y": "2", "mine": "3", **TRACE}
    late = flow.late.options(headers={"x-a": "", "own": "4"}).partial()

    (flow.work.options(headers=headers, expires=60).signature() | late).send()
    flow.drain()

    assert "machinery_expires" in flow.sent("work").headers
    assert without_kin(flow.sent("late")) == {
        "tenant": "acme",
        "tenant_id": "7",
        "x-a": "",
        "own": "4",
        "mine": "3",
        **TRACE,
    }


def test_send_outside_a_task_inherits_nothing(flow: Flow) -> None:
    flow.work.options(headers=TRACE).send()
    flow.drain()
    flow.late.send()
    assert without_kin(flow.sent("late")) == {}


def test_the_publish_handler_sees_the_task_that_sends(flow: Flow) -> None:
    seen: list[tuple[str, str]] = []

    @flow.server.set_pre_publish_handler
    def look(signature: Signature[Any]) -> None:
        try:
            seen.append((signature.name, current_task().name))
        except MachineryError:
            seen.append((signature.name, ""))

    flaky = flow.server.task("flaky", retries=1, backoff=[0])(_away)
    (flow.parent.signature() | flow.work.partial()).send()
    flow.drain()
    assert seen == [("parent", ""), ("late", "parent"), ("work", "parent")]
    seen.clear()

    flaky.signature().catch(flow.late.partial()).send()
    flow.drain()
    assert seen == [("flaky", ""), ("flaky", "flaky"), ("late", "flaky")]
    seen.clear()

    chord(group(flow.work.signature()), flow.late.partial()).send()
    flow.drain()
    assert seen == [("work", ""), ("late", "")]  # its members have run anywhere
    seen.clear()

    chord(group(flow.fail.signature()), flow.work.partial().catch(flow.late.partial())).send()
    flow.drain()
    assert seen == [("fail", ""), ("late", "work")]
    with pytest.raises(MachineryError, match="outside"):
        current_task()


def test_a_handler_may_send_for_a_task_whose_time_is_up(flow: Flow) -> None:
    flow.server.task("slow", time_limit=0.05)(_until_time_is_up)
    flow.server.set_pre_publish_handler(
        lambda signature: (
            None
            if signature.name != "late"
            else (flow.work.send(), flow.published.append(signature))[1]
        )
    )
    Signature(name="slow", sender=flow.server).catch(flow.late.partial()).send()
    with flow.server.new_worker(concurrency=1):
        wait_until(lambda: any(one.name == "late" for one in flow.published))


def test_handlers_around_a_sending_add_headers(flow: Flow) -> None:
    """Once for all that is sent together, and not for what a worker sends by itself."""
    calls: list[object] = []

    @flow.server.around_send
    def outer(signatures: Sequence[Signature[Any]]) -> Iterator[dict[str, str]]:
        calls.append([one.name for one in signatures])
        yield {"a": "outer", "self": "outer"}
        calls.append("sent")

    @flow.server.around_send
    def inner(signatures: Sequence[Signature[Any]]) -> Iterator[None]:
        calls.append({one.headers["self"] for one in signatures})
        try:
            yield None
        except ArgumentError:
            calls.append("refused")
            raise

    own = flow.work.options(headers={"a": "own", "b": "own"})
    group(own.signature().then(flow.late.partial()), flow.parent.signature()).send()
    flow.drain()
    with pytest.raises(ArgumentError):
        flow.work.send("x" * 2**24)

    assert without_kin(flow.published[0]) == {"a": "outer", "b": "own", "self": "outer"}
    one_sending = {"outer"}
    assert calls[:3] == [["work", "parent"], one_sending, "sent"]
    assert calls[3:6] == [["late"], one_sending, "sent"]  # by the running parent, not by `then`
    assert calls[6:] == [["work"], one_sending, "refused"]
    flow.server.task("once", unique=True)(lambda: None).send()
    assert flow.sent("once").headers["a"] == "outer"


def test_headers_that_a_run_hands_on_go_to_what_follows_it(flow: Flow) -> None:
    handed_on: list[object] = []

    @flow.server.around_task
    def hand(signature: Signature[Any]) -> Iterator[None]:
        number = current_task().attempt
        current_task().hand_on({"traceparent": f"run {number}", "machinery_x": f"{number}"})
        yield

    flow.server.on_failure(lambda ctx, _: handed_on.append(dict(ctx.handed_on)))
    flaky = flow.server.task("flaky", retries=1, backoff=[0])(_away)
    flaky.options(headers=TRACE).signature().catch(flow.late.partial()).send()
    flow.drain()

    retried = flow.sent("flaky").headers
    assert retried.items() >= {**TRACE, "machinery_x": "1"}.items()
    assert retried["machinery_run"] == "1"
    assert without_kin(flow.sent("late")) == {**TRACE, "traceparent": "run 2"}
    assert handed_on == [{"traceparent": "run 2", "machinery_x": "2"}]
    flow.parent.send()
    flow.drain()
    assert without_kin(flow.sent("late")) == {"traceparent": "run 1"}


def _async_parent(flow: Flow) -> Any:
    async def async_parent() -> None:
        await flow.late.send_async()

    return async_parent


def _until_time_is_up() -> None:
    while not current_task().cancelled:
        threading.Event().wait(0.01)


def _away() -> None:
    raise ConnectionError("away")


# What is refused before it is sent


REFUSED: dict[str, Callable[[Any, Any, Any], Step[Any]]] = {
    "too few": lambda pair, alert, work: pair.partial(1),
    "too many": lambda pair, alert, work: Signature.of("pair", 1, "x", 3),
    "not an int": lambda pair, alert, work: Signature.of("pair", "1", "x"),
    "by hand": lambda pair, alert, work: Signature(
        name="pair", args=[Arg(type="string", value="1"), Arg(type="string", value="x")]
    ),
    "no type": lambda pair, alert, work: Signature(
        name="pair", args=[Arg(type="struct", value={}), Arg(type="string", value="x")]
    ),
    "keyword": lambda pair, alert, work: Signature.of("alert", "e", 1, nosuch=1),
    "first step": lambda pair, alert, work: chain(pair.partial(1), work),
    "step": lambda pair, alert, work: chain(work, Signature.of("pair", 1, "x", 3)),
    "step of a wrong type": lambda pair, alert, work: chain(work, Signature.of("pair", "1")),
    "step that gets nothing": lambda pair, alert, work: chain(
        work, pair.partial(1), pass_results=False
    ),
    "member": lambda pair, alert, work: group(work, pair.partial(1)),
    "chord": lambda pair, alert, work: chord(group(work), Signature.of("pair", 1, "x", 3)),
    "immutable chord": lambda pair, alert, work: chord(
        group(work), pair.partial(1).replace(immutable=True)
    ),
    "then": lambda pair, alert, work: work.then(Signature.of("pair", "1")),
    "catch": lambda pair, alert, work: work.catch(alert.partial()),
    "catch behind": lambda pair, alert, work: chain(work, work.catch(alert.partial("x"))),
}


ACCEPTED: dict[str, Callable[[Any, Any, Any], Step[Any]]] = {
    "complete": lambda pair, alert, work: pair.signature(1, "x"),
    "step": lambda pair, alert, work: chain(work, pair.partial(1)),
    "nothing given": lambda pair, alert, work: chain(work, pair.partial()),
    "chord": lambda pair, alert, work: chord(group(work, work), pair.partial()),
    "immutable": lambda pair, alert, work: chain(work, pair.signature(1, "x"), pass_results=False),
    "then": lambda pair, alert, work: work.then(pair.partial(1)),
    "catch": lambda pair, alert, work: work.catch(alert.partial(5)),
    "catch of a chord": lambda pair, alert, work: chord(group(work), work.catch(alert.partial(5))),
    "int for a float": lambda pair, alert, work: Signature.of("scale", 1),
    "Go's int32": lambda pair, alert, work: Signature(
        name="scale", args=[Arg(type="int32", value=1)]
    ),
    "default": lambda pair, alert, work: Signature.of("alert", "e", 5, deep=True),
}


@pytest.mark.parametrize("place", REFUSED)
def test_call_that_the_worker_would_refuse_is_not_sent(flow: Flow, place: str) -> None:
    pair, alert = (
        flow.server.register_task("pair", _pair),
        flow.server.register_task("alert", _alert),
    )
    step = REFUSED[place](pair, alert, flow.work.signature())
    with pytest.raises(ArgumentError, match=r"^(pair|alert)"):
        flow.server.send(step)
    assert flow.published == []


@pytest.mark.parametrize("place", ACCEPTED)
def test_call_that_may_get_more_arguments_is_sent(flow: Flow, place: str) -> None:
    pair, alert = (
        flow.server.register_task("pair", _pair),
        flow.server.register_task("alert", _alert),
    )
    flow.server.register_task("scale", _scale)
    flow.server.send(ACCEPTED[place](pair, alert, flow.work.signature()))
    assert flow.published


def test_a_call_of_a_task_that_is_unknown_here_is_sent(flow: Flow) -> None:
    flow.server.send_task(Signature.of("elsewhere", "1", 2, third=3))
    assert len(flow.published) == 1


def test_a_call_that_was_checked_and_changed_is_checked_again(flow: Flow) -> None:
    pair = flow.server.register_task("pair", _pair)
    for changed in (
        pair.signature(1, "x").with_args(after=[Arg.of(3)]),
        pair.signature(1, "x").replace(args=[Arg.of("1")]),
    ):
        with pytest.raises(ArgumentError, match="pair"):
            changed.send()


def _pair(a: int, b: str) -> None: ...
def _alert(error: str, code: int, *, deep: bool = False) -> None: ...
def _scale(factor: float) -> None: ...


def kin_of(signature: Signature[Any]) -> tuple[str, str, Any]:
    return signature.root, signature.parent, signature.headers.get(HEADER_ORIGIN)


def test_steps_know_their_root_and_the_task_before_them(flow: Flow) -> None:
    first = flow.work.signature().with_uuid()
    flow.server.send(first.then(flow.fail.partial(), flow.late.partial()))
    flow.drain()

    assert flow.published[0].headers == {}
    assert kin_of(flow.sent("late")) == (first.uuid, first.uuid, "harness")
    state = flow.server.backend.get_state(flow.sent("late").uuid)
    assert (state.root, state.parent) == (first.uuid, first.uuid)


def test_retry_keeps_its_parent(flow: Flow) -> None:
    flaky = flow.server.task("flaky", retries=2, backoff=[0.0])(_away)
    sender = flow.server.task("sender")(lambda: flaky.send() and None)
    alone, child = flaky.send(), sender.send()
    flow.drain()

    tries = [one for one in flow.published if one.name == "flaky"]
    assert {kin_of(one) for one in tries if one.uuid == alone.uuid} == {("", "", None)}
    children = [one for one in tries if one.uuid != alone.uuid]
    assert {kin_of(one) for one in children} == {(child.uuid, child.uuid, "harness")}
    assert len(tries) == 6


def test_send_that_waits_for_room_gives_up_once_a_reply_was_lost() -> None:
    """A store forgets the token of a submission: a repeat an hour later would send it twice."""
    server = Server(Config(broker="memory://lost-reply", publish_timeout=0.2))
    answers: list[Exception] = [
        QueueFull("q", waiting=1, limit=1, adds=1),
        PublishUnknown("no reply"),
        BrokerUnavailable("away"),
        QueueFull("q", waiting=1, limit=1, adds=1),
    ]

    def publish() -> None:
        raise answers.pop(0) if len(answers) > 1 else answers[0]

    with pytest.raises(PublishUnknown, match="no reply"):
        server.app.patiently(publish, block=3600.0)
    assert len(answers) == 1
    server.close()
