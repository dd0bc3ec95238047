"""The Harness: what a user's tests ask and tell."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
import decimal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from machinery_py import (
    ArgumentError,
    Context,
    NoRetry,
    ResultExpired,
    ResultTimeout,
    RetryTaskLater,
    Server,
    Signature,
    State,
    StateNotFound,
    TaskFailed,
    chain,
    current_task,
    group,
)
from machinery_py.clock import SYSTEM_CLOCK
from machinery_py.errors import SignalTimeout
from machinery_py.testing import Harness
from machinery_py.testing.harness import running_worker, swapped

Find = Callable[[Harness], Signature[Any]]


@dataclasses.dataclass(frozen=True)
class Parcel:
    weight: float
    city: str


class Shop:
    """A user's application: a Server and its tasks. Opening its stores would make a file."""

    def __init__(self, path: str) -> None:
        self.server = Server(f"sqlite:///{path}/never-made.db")
        server = self.server
        self.tries = 0

        @server.task
        def add(a: int, b: int = 10, *more: int) -> int:
            return a + b + sum(more)

        @server.task
        def welcome(email: str, *, lang: str = "en") -> str:
            return f"{lang}:{email}"

        @server.task
        def fail(text: str) -> None:
            raise ValueError(text)

        @server.task(retries=2, backoff=[10, 60])
        def flaky(good: int) -> int:
            self.tries += 1
            if self.tries < good:
                raise ConnectionError("away")
            return self.tries

        @server.task
        def later(ctx: Context) -> str:
            if ctx.signature.run == 0:
                raise RetryTaskLater("busy", dt.timedelta(hours=4))
            return "done"

        @server.task(queue="post")
        def ship(parcel: Parcel, price: decimal.Decimal) -> str:
            return f"{parcel.city} {price}"

        @server.task
        def fan_out(count: int) -> None:
            for i in range(count):
                add.options(queue=f"new-{i}").send(i)

        @server.task
        async def fetch(url: str) -> str:
            return url.upper()

        self.add, self.welcome, self.fail, self.flaky = add, welcome, fail, flaky
        self.later, self.ship, self.fan_out, self.fetch = later, ship, fan_out, fetch


@pytest.fixture
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    return Shop(str(tmp_path_factory.getbasetemp()))


@pytest.fixture
def machinery(shop: Shop) -> Iterator[Harness]:
    with Harness(shop.server) as harness:
        yield harness


# Running


def test_nothing_runs_by_itself(shop: Shop, machinery: Harness) -> None:
    result = shop.add.send(1, 2)

    assert result.get_state().state is State.PENDING
    assert machinery.drain() == 1
    assert result.get(timeout=0) == 3
    assert machinery.drain() == 0


def test_delay_goes_by_the_clock(shop: Shop, machinery: Harness) -> None:
    result = shop.add.options(delay=3600).send(1, 2)
    assert machinery.drain() == 0

    machinery.advance(minutes=59, seconds=59)
    assert machinery.drain() == 0
    machinery.advance(seconds=1)
    assert machinery.drain() == 1

    assert result.touch() == 3


def test_an_eta_made_from_the_real_time_is_due_after_its_length(
    shop: Shop, machinery: Harness
) -> None:
    eta = dt.datetime.now(dt.timezone.utc) + dt.timedelta(minutes=5)
    shop.server.send_task(shop.add.signature(1).replace(eta=eta))
    assert machinery.drain() == 0
    machinery.advance(minutes=5)
    assert machinery.drain() == 1


def test_callbacks_and_steps_run_in_the_same_drain(shop: Shop, machinery: Harness) -> None:
    result = (
        shop.add.signature(1, 1)
        | group(shop.add.partial(1), shop.add.partial(2))
        | shop.add.partial(100)
    ).send()
    assert machinery.drain() == 4
    assert result.get(timeout=0) == 100 + 3 + 4


def test_task_sent_to_a_new_queue_runs_in_the_same_drain(shop: Shop, machinery: Harness) -> None:
    shop.fan_out.send(3)
    assert machinery.drain() == 4


def test_a_counted_retry_waits_for_its_back_off(shop: Shop, machinery: Harness) -> None:
    result = shop.flaky.send(3)

    assert machinery.drain() == 1
    assert result.get_state().state is State.RETRY
    assert machinery.drain() == 0
    machinery.advance(seconds=10)
    assert machinery.drain() == 1
    machinery.advance(seconds=59)
    assert machinery.drain() == 0
    machinery.advance(seconds=1)
    assert machinery.drain() == 1

    assert result.get(timeout=0) == 3
    assert result.get_state().attempt == 3


def test_a_task_that_postpones_itself_comes_back(shop: Shop, machinery: Harness) -> None:
    result = shop.later.send()
    assert machinery.drain() == 1
    assert result.touch() is None
    machinery.advance(hours=4)
    assert machinery.drain() == 1
    assert result.touch() == "done"


def test_a_task_that_sleeps_for_days_takes_none(shop: Shop, machinery: Harness) -> None:
    @shop.server.task
    def remind() -> str:
        task = current_task()
        task.step("welcome", str)
        task.sleep(dt.timedelta(days=3))
        return task.step("reminder", str, "sent")

    result = remind.send()
    assert machinery.drain() == 1
    machinery.advance(days=2, hours=23)
    assert machinery.drain() == 0
    machinery.advance(hours=1)
    assert machinery.drain() == 1
    assert result.touch() == "sent"


def test_a_task_waits_for_a_signal_of_the_test(shop: Shop, machinery: Harness) -> None:
    @shop.server.task
    def approve() -> str:
        try:
            return str(current_task().wait_for("approval", timeout=dt.timedelta(days=7)))
        except SignalTimeout:
            return "nobody came"

    told, late = approve.send(), approve.send()
    assert machinery.drain() == 2
    assert shop.server.signal(told.uuid, "approval", "yes")
    assert machinery.drain() == 1
    assert told.touch() == "yes"
    machinery.advance(days=7)
    assert machinery.drain() == 1
    assert late.touch() == "nobody came"


def test_an_expired_task_is_not_run(shop: Shop, machinery: Harness) -> None:
    result = shop.add.options(expires=60, delay=120).send(1, 2)
    machinery.advance(seconds=120)
    assert machinery.drain(raise_failures=False) == 0
    with pytest.raises(TaskFailed, match="expired"):
        result.get(timeout=0)


def test_results_expire_by_the_clock(shop: Shop, machinery: Harness) -> None:
    result = shop.add.send(1, 2)
    machinery.drain()
    machinery.advance(seconds=3601)
    with pytest.raises(ResultExpired):
        result.get(timeout=0)
    with pytest.raises(StateNotFound):
        machinery.state(result)


def test_the_first_failure_comes_out_with_its_cause(shop: Shop, machinery: Harness) -> None:
    first = shop.fail.send("one")
    shop.fail.send("two")
    shop.add.send(1, 2)

    with pytest.raises(TaskFailed, match="one") as caught:
        machinery.drain()

    assert caught.value.uuid == first.uuid
    assert isinstance(caught.value.__cause__, ValueError)
    assert "two" in caught.value.__notes__[0]
    assert machinery.drain() == 0, "everything due has been run"
    assert list(machinery.results.values()) == [3]


def test_failures_can_be_left_where_they_are(shop: Shop, machinery: Harness) -> None:
    result = shop.fail.send("one")
    assert machinery.drain(raise_failures=False) == 1
    assert machinery.state(result.uuid).error == "one"


def test_a_retry_is_no_failure_and_its_last_attempt_is(shop: Shop, machinery: Harness) -> None:
    shop.flaky.send(99)
    assert machinery.drain() == 1
    machinery.advance(seconds=10)
    assert machinery.drain() == 1
    machinery.advance(seconds=60)
    with pytest.raises(TaskFailed, match="away"):
        machinery.drain()


def test_no_retry_comes_out(machinery: Harness, shop: Shop) -> None:
    @shop.server.task(retries=5)
    def download(url: str) -> None:
        raise NoRetry(f"not a web address: {url}")

    download.send("ftp://x")
    with pytest.raises(TaskFailed, match="not a web address") as caught:
        machinery.drain()
    assert isinstance(caught.value.__cause__, NoRetry)


def test_a_coroutine_function_is_run(shop: Shop, machinery: Harness) -> None:
    result = shop.fetch.send("abc")
    assert machinery.drain() == 1
    assert result.get(timeout=0) == "ABC"


def test_a_revoked_task_is_not_run(shop: Shop, machinery: Harness) -> None:
    result = shop.add.send(1, 2)
    result.revoke()
    assert machinery.drain(raise_failures=False) == 0
    with pytest.raises(TaskFailed, match="revoked"):
        result.get(timeout=0)


def test_unsendable_argument_fails_in_the_harness_too(shop: Shop, machinery: Harness) -> None:
    with pytest.raises(ArgumentError, match="fail argument 'text'"):
        shop.fail.send(object())  # type: ignore[arg-type]
    assert machinery.sent == []


def test_waiter_for_a_task_without_workers_is_told_in_time(shop: Shop, machinery: Harness) -> None:
    result = shop.add.send(1, 2)
    with pytest.raises(ResultTimeout, match="last state PENDING, no worker on"):
        result.get(timeout=0.05)


def test_a_coroutine_may_drain(shop: Shop, machinery: Harness) -> None:
    async def use() -> str:
        result = await shop.fetch.send_async("abc")
        assert machinery.drain() == 1
        return await result

    assert asyncio.run(use()) == "ABC"


# Looking


def test_sent_has_the_calls_in_order_with_python_values(shop: Shop, machinery: Harness) -> None:
    shop.ship.send(Parcel(1.5, "Ulm"), decimal.Decimal("9.90"))
    shop.add.options(delay=60).send(1, 2)

    ship, add = machinery.sent
    assert (ship.name, ship.routing_key) == ("ship", "post")
    assert ship.args[1].value == decimal.Decimal("9.90")
    assert [arg.value for arg in add.args] == [1, 2]
    assert add.eta == machinery.clock.now() + dt.timedelta(minutes=1)


def test_sent_lists_sends_of_tasks_and_callbacks_but_no_retries(
    shop: Shop, machinery: Harness
) -> None:
    shop.flaky.send(2)
    shop.add.signature(1, 1).then(shop.add.partial(5)).send()
    machinery.drain()
    machinery.advance(seconds=10)
    machinery.drain()
    assert [one.name for one in machinery.sent] == ["flaky", "add", "add"]
    machinery.assert_sent("add", 5, 2)


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m.assert_sent("add"),
        lambda m: m.assert_sent("add", 1, 10),
        lambda m: m.assert_sent("add", 1),
        lambda m: m.assert_sent("add", a=1),
        lambda m: m.assert_sent("add", a=1, b=10),
        lambda m: m.assert_sent("welcome", "a@b.c"),
        lambda m: m.assert_sent("welcome", "a@b.c", lang="en"),
        lambda m: m.assert_sent("ship", Parcel(1.0, "Ulm"), decimal.Decimal(3)),
        lambda m: m.assert_sent("resize", "cat.png", 800),
    ],
)
def test_assert_sent_finds_calls_in_every_spelling(
    shop: Shop, machinery: Harness, call: Find
) -> None:
    shop.add.send(1)
    shop.welcome.send(email="a@b.c")
    shop.ship.send(Parcel(1.0, "Ulm"), decimal.Decimal(3))
    shop.server.send_task(Signature.of("resize", "cat.png", 800))
    assert call(machinery).name in ("add", "welcome", "ship", "resize")


def test_assert_sent_takes_the_task_itself_and_returns_the_call(
    shop: Shop, machinery: Harness
) -> None:
    result = shop.welcome.options(headers={"tenant": "acme"}).send("a@b.c", lang="fr")
    found = machinery.assert_sent(shop.welcome, "a@b.c", lang="fr")
    assert found.uuid == result.uuid
    assert found.headers["tenant"] == "acme"


def test_failed_assert_sent_lists_the_sent_calls(shop: Shop, machinery: Harness) -> None:
    shop.add.send(1, 2)
    shop.welcome.send("a@b.c", lang="fr")
    with pytest.raises(AssertionError) as caught:
        machinery.assert_sent("add", 1, 3)
    assert (
        str(caught.value)
        == "add(1, 3) was not sent\nsent:\n  add(1, 2)\n  welcome('a@b.c', lang='fr')"
    )


def test_assert_sent_offers_the_nearest_name(shop: Shop, machinery: Harness) -> None:
    with pytest.raises(AssertionError, match="nothing was sent"):
        machinery.assert_sent("add")
    shop.welcome.send("a@b.c")
    with pytest.raises(AssertionError, match="did you mean 'welcome'"):
        machinery.assert_sent("welcom")


def test_assert_sent_shows_the_first_of_many(shop: Shop, machinery: Harness) -> None:
    for i in range(25):
        shop.add.send(i)
    with pytest.raises(AssertionError, match=r"add\(19\)\n  and 5 more"):
        machinery.assert_sent("add", 99)


def test_assert_sent_finds_calls_that_do_not_fit(shop: Shop, machinery: Harness) -> None:
    shop.server.app.submit(
        [Signature.of("add", "x", "y")]
    )  # as a program would that does not know the task
    machinery.assert_sent("add", "x", "y")
    machinery.assert_sent("add")
    machinery.assert_not_sent("add", 1)


def test_assert_not_sent(shop: Shop, machinery: Harness) -> None:
    machinery.assert_not_sent("add")
    shop.add.send(1, 2)
    machinery.assert_not_sent("add", 1, 3)
    machinery.assert_not_sent(shop.welcome)
    with pytest.raises(AssertionError, match=r"add\(1, 2\) was sent, 1 times"):
        machinery.assert_not_sent("add", 1, 2)


def test_clear_forgets_sent_tasks(shop: Shop, machinery: Harness) -> None:
    shop.add.send(1, 2)
    machinery.clear()
    assert machinery.sent == []
    assert machinery.drain() == 1
    assert list(machinery.results.values()) == [3]


# Putting back


def test_harness_restores_stores_and_clock_after_an_error(shop: Shop) -> None:
    server = shop.server
    config, stores, waiters = server.config, server.app._stores, server._waiters

    with pytest.raises(ZeroDivisionError), Harness(server) as machinery:
        assert server.clock is machinery.clock
        assert server.config.broker.startswith("memory://")
        assert server.waiters is not waiters
        raise ZeroDivisionError

    assert server.config is config
    assert server.clock is SYSTEM_CLOCK
    assert server.app._stores is stores
    assert server._waiters is waiters
    assert object not in server.events.wanted  # type: ignore[arg-type]


def test_two_harnesses_in_turn_share_nothing(shop: Shop) -> None:
    with Harness(shop.server):
        shop.add.send(1, 2)
    with Harness(shop.server) as machinery:
        assert machinery.drain() == 0
        assert machinery.sent == []


def test_closing_the_server_does_not_lead_to_its_own_stores(shop: Shop, machinery: Harness) -> None:
    shop.add.send(1, 2)
    shop.server.close()
    assert shop.server.config.broker.startswith("memory://")
    assert machinery.drain() == 1


def test_an_app_that_refuses_embedded_stores_can_be_tested() -> None:
    server = Server("memory://")
    server.app.config = server.config.replace(require_server=False, strict_durability=True)
    with swapped(server):
        assert server.config.strict_durability is False


def test_a_chain_breaks_as_in_a_worker(shop: Shop, machinery: Harness) -> None:
    result = chain(shop.fail.signature("x"), shop.add.partial(1)).send()
    with pytest.raises(TaskFailed, match="x"):
        machinery.drain()
    with pytest.raises(TaskFailed, match="x"):
        result.get(timeout=0)
    machinery.assert_not_sent("add")


def test_a_running_worker_serves_the_queues_of_the_tasks(shop: Shop) -> None:
    with running_worker(shop.server) as worker:
        assert set(worker.queues) == {"machinery_tasks", "post"}
        assert shop.ship.send(Parcel(1.0, "Ulm"), decimal.Decimal(3)).get(timeout=30) == "Ulm 3"
    assert shop.server.config.broker.startswith("sqlite:")


def test_schedules_run_in_virtual_time() -> None:
    server = Server("memory://")
    ran: list[str] = []

    @server.periodic("0 9 * * MON-FRI", tz="Europe/Berlin")
    def digest() -> None:
        ran.append("digest")

    @server.periodic("0 * * * *", overlap="skip")
    def hourly() -> None:
        ran.append("hourly")

    with Harness(server) as machinery:
        machinery.assert_not_sent("digest")
        machinery.advance(days=7)
        machinery.assert_sent("digest")
        assert sum(one.name == "digest" for one in machinery.sent) == 5
        machinery.drain()
        assert (
            ran.count("hourly") == 7
        )  # nothing ran while the time passed: a run holds the next ones up for a day
        for _ in range(3):
            machinery.advance(hours=1)
            machinery.drain()
        assert ran.count("hourly") == 10
        server.schedules.pause("digest")
        before = len(machinery.sent)
        server.schedules.pause("hourly")
        machinery.advance(days=7)
        assert len(machinery.sent) == before

    assert not server.backend.records().bodies  # the server's own store knows nothing of it
