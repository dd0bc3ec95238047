"""Every public call of docs API-BY-EXAMPLE 1-10, 13-15, 17 and 18, with its checked types.

Read by mypy --strict and pyright, see test_typing.py; never run.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import smtplib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from email.message import EmailMessage
from typing import Any, assert_type

import pytest

from machinery_py import (
    Arg,
    AsyncResult,
    BatchFailed,
    Chain,
    ChainResult,
    ChordResult,
    Config,
    Context,
    Group,
    GroupResult,
    MachineryError,
    NoRetry,
    ResultExpired,
    ResultTimeout,
    Retry,
    RetryTaskLater,
    Server,
    Signature,
    State,
    Task,
    TaskFailed,
    TaskSet,
    TaskState,
    Worker,
    chain,
    chord,
    current_task,
    exponential,
    group,
)
from machinery_py.brokers.base import DeadLetter
from machinery_py.inspection import QueueReport, TaskReport
from machinery_py.schedules.api import ScheduleReport
from machinery_py.testing import Harness, ManualClock, wait_until

server = Server()


@server.task
def add(a: int, b: int, *more: int) -> int:
    return a + b + sum(more)


@server.task
def multiply(*numbers: int) -> int:
    total = 1
    for n in numbers:
        total *= n
    return total


@server.task
def report(day: str) -> str:
    return f"report for {day}"


@server.task
def alert(error: str, team: str) -> None:
    print(f"{team}: {error}")


# 1 and 2

assert_type(add.send(2, 3).get(timeout=5), int)
assert_type(add.send(2, 3).get(timeout=dt.timedelta(seconds=5)), int)
assert_type(Config(lease=dt.timedelta(seconds=5)).lease, float)
assert_type(Config(results_expire_in=dt.timedelta(days=1)).results_expire_in, int)
assert_type(add(2, 3), int)
assert_type(add.signature(1, 2), Signature[int])
assert_type(server.send_task(add.signature(1, 2)), AsyncResult[int])
Signature(name="add", args=[Arg(type="int64", value=1)])
assert_type(add.signature(1, 2).replace(eta=dt.datetime.now(dt.timezone.utc)), Signature[int])
assert_type(add.signature(1, 2).replace(retry_count=3), Signature[int])
assert_type(add.options(delay=5).send(1, 2), AsyncResult[int])
server.new_worker("w1", 10).launch()
assert_type(server.new_custom_queue_worker("w1", 10, "mail"), Worker)
assert_type(server.inspect.tasks(queue="mail"), list[TaskState])
server.broker.get_pending_tasks("mail")
server.broker.get_delayed_tasks()


# 3

Server()
Server("redis://:secret@localhost:6379/0")
Server(
    broker="amqp://guest:guest@localhost:5672/",
    result_backend="mongodb://localhost:27017/tasks",
    lock="redis://localhost:6379/1",
)
Server(Config(broker="redis://localhost:6379", default_queue="mail", results_expire_in=3600))
Server(Config.from_yaml("config.yml"))
Server(Config.from_toml("config.toml"))
Server(Config.from_env(prefix=""))


# 4


@server.task
def send_welcome(email: str, *, lang: str = "en") -> None: ...


@server.task("billing.charge", queue="billing", retries=5, retry_on=ConnectionError, time_limit=30)
def charge(order_id: int, cents: int) -> str:
    return f"receipt-{order_id}"


@server.task
async def fetch(url: str) -> str:
    return url


@server.task
def crunch(ctx: Context, rows: int) -> float:
    for i in ctx.track(range(rows)):
        assert_type(i, int)
        logging.debug("row %d", i)
    ctx.progress(rows, rows)
    return 1.0


@server.task(retries=1)
async def acrunch(ctx: Context, rows: int) -> list[str]:
    return [ctx.uuid] * rows


@server.task
def pair() -> tuple[str, int]:
    return "a", 1


def plain(a: int) -> int:
    return a


server.register_tasks({"plain": plain, "shout": str.upper})


@server.task
def echo(
    value: Any, times: int = 1
) -> list[int]:  # a first parameter that takes anything is no Context
    return [times]


@server.task(retries=1)
async def aecho(*values: object) -> int:
    return len(values)


echo.send("x", 2)
aecho.send("x", 2)
registered: Task[[int], int] = server.register_task("plain2", plain)
assert_type(registered.send(1).get(), int)

assert_type(charge.send(42, 999).get(), str)
assert_type(fetch.send("x").get(), str)
assert_type(crunch.send(5).get(), float)
assert_type(crunch(5), float)
assert_type(acrunch.send(5).get(), list[str])
assert_type(pair.send().get(), tuple[str, int])
assert_type(charge(1, 2), str)
assert_type(current_task(), Context)
assert_type(current_task().attempt, int)


# TaskSet

mail_tasks = TaskSet(queue="mail", retries=5, retry_on=ConnectionError)


@mail_tasks.task
def deliver(to: str, copies: int = 1) -> int:
    return copies


@mail_tasks.task("billing.bill", time_limit=dt.timedelta(minutes=1))
async def bill(ctx: Context, order: int) -> str:
    return ctx.uuid


@mail_tasks.task()
def store(value: object) -> None: ...


server.include(mail_tasks)
server.include(mail_tasks, prefix="mail.", queue="post", ack="early")
assert_type(deliver.send("ada").get(), int)
assert_type(deliver("ada", copies=2), int)
assert_type(bill.send(5).get(), str)
assert_type((deliver.signature("ada") | bill.partial()).send().get(), str)


# 5

result: AsyncResult[int] = add.send(1, 2)
send_welcome.send("ada@example.com", lang="fr")
add.options(queue="slow", priority=9, expires=60).send(1, 2)
add.options(headers={"tenant": "acme"}).send(1, 2)

sig = add.signature(1, 2)
server.send_task(sig)
assert_type(sig.uuid, str)

server.send_task(
    Signature(
        name="add",
        args=[
            Arg(type="int64", value=1),
            Arg(type="int64", value=2),
        ],
    )
)
assert_type(Signature.of("resize", "cat.png", 800), Signature[Any])
server.send_task(Signature.of("resize", "cat.png", 800))


# 6

add.options(delay=5).send(1, 2)
add.options(delay=dt.timedelta(hours=2)).send(1, 2)
add.options(eta=dt.datetime(2027, 1, 1, tzinfo=dt.timezone.utc)).send(1, 2)

eta = dt.datetime.now(dt.timezone.utc) + dt.timedelta(seconds=5)
server.send_task(add.signature(1, 2).replace(eta=eta))


# 7


@server.task(retries=3)
def flaky() -> None: ...


@server.task(retries=8, backoff="exponential", retry_on=(ConnectionError, TimeoutError))
def sync_crm(user_id: int) -> None: ...


@server.task(retries=3, backoff=[10, 60, 600])
def slow_api() -> None: ...


@server.task(retries=3, backoff=lambda n: n * 30.0)
def slower_api() -> None: ...


@server.task(retries=3)
def download(url: str) -> None:
    if "busy" in url:
        raise RetryTaskLater("server is busy", dt.timedelta(hours=4))
    if not url.startswith("https:"):
        raise NoRetry(f"not a web address: {url}")
    if current_task().attempt > 2:
        logging.warning("third try of %s", url)


@server.task(
    retries=None, backoff=exponential(base=2, cap=600, jitter="half"), dont_retry_on=KeyError
)
def stubborn(url: str, *, again: bool = False) -> None:
    raise Retry(delay=dt.timedelta(hours=1), args=(url,), kwargs={"again": True}, retries=20)


@server.task(ack="early", on_failure="dead_letter", on_worker_lost="fail")
def debit(order: int) -> None: ...


debit.options(time_limit=None, ignore_result=True, result_expires=60).send(7)
flaky.options(retries=10, time_limit=30, kill_after=5).send()
stubborn.options(retries=None).send("https://example.com")


# 8

result = add.send(2, 3)
assert_type(result.get(timeout=5), int)
assert_type(result.touch(), int | None)
assert_type(result.is_finished(), bool)
assert_type(result.get_state(), TaskState)
assert_type(result.get_state().state, State)
assert_type(result.get_state().progress, tuple[float, float] | None)
result.revoke()

again = server.result(result.uuid)
assert_type(again, AsyncResult[Any])
try:
    again.get(timeout=5)
except TaskFailed as failure:
    assert_type(failure.error, str)
    print(failure.error, failure.error_type, failure.traceback)
except ResultTimeout as late:
    print(late)
except ResultExpired as gone:
    assert_type(gone.uuid, str)
except TimeoutError:
    pass
except MachineryError:
    pass


async def handler() -> int:
    result = await add.send_async(2, 3)
    assert_type(result, AsyncResult[int])
    assert_type(await result.get_async(timeout=5), int)
    return await result


# 9

three = add.signature(1, 1) | add.partial(5, 5) | multiply.partial(4)
assert_type(three, Chain[int])
assert_type(three.send().get(timeout=5), int)
assert_type((report.signature("x") | add.partial()).send().get(), int)
assert_type((add.signature(1, 1) | report.partial()).send().get(), str)
server.send_chain(chain(add.signature(1, 1), add.partial(5, 5), multiply.partial(4)))
assert_type(server.send_chain(three), ChainResult[int])
assert_type(server.send_chain(three).get(), int)
for step in three.send().steps:
    step.get()

assert_type(group(add.signature(i, i) for i in range(10)), Group[list[int]])
assert_type(group(add.signature(i, i) for i in range(10)).send().get(timeout=5), list[int])
assert_type(group(add.signature(1, 1), add.signature(5, 5)).send().get(), list[int])
assert_type(
    server.send_group(group(add.signature(1, 1), add.signature(5, 5)), send_concurrency=10),
    GroupResult[list[int]],
)

assert_type(
    (group(add.signature(1, 1), add.signature(5, 5)) | multiply.partial()).send().get(timeout=5),
    int,
)
assert_type(
    server.send_chord(
        chord(group(add.signature(1, 1), add.signature(5, 5)), multiply.partial()), 10
    ),
    ChordResult[int],
)


@server.task
def total(numbers: list[int]) -> int:
    return sum(numbers)


assert_type(
    chord(group(add.signature(i, 1) for i in range(100)), total.partial(), collect=True)
    .send()
    .get(),
    int,
)

chain(report.signature("mon"), report.signature("tue"), pass_results=False).send()
(report.signature("a") | group(report.partial(), report.partial()) | total.partial()).send()
group(add.signature(1, 1) | add.partial(2), add.signature(3, 3))
assert_type(report.map(["mon", "tue"]), Group[list[str]])
assert_type(charge.starmap([(42, 999)]), Group[list[str]])
assert_type(charge.chunks([(42, 999)], 100), Group[list[list[str]]])
assert_type(fetch.map(["x"]).send().get(), list[str])
assert_type((report.map(["mon"]) | add.partial()).send().get(), int)
chord(report.map(["mon"]), report.partial(), on_failure="skip").then(add.partial())


# 10

assert_type(charge.signature(42, 999).then(report.partial()), Signature[str])
assert_type(
    charge.signature(42, 999).then(report.partial()).catch(alert.partial("billing")).send().get(),
    str,
)

server.send_task(
    charge.signature(42, 999).replace(
        on_success=[report.partial()],
        on_error=[alert.partial("billing")],
    )
)


# 13


def run_worker() -> None:
    worker = server.new_worker("worker-1", concurrency=10)

    @worker.set_error_handler
    def on_error(error: Exception) -> None:
        logging.error("task failed: %s", error)

    @worker.set_pre_task_handler
    def before(signature: Signature[object]) -> None: ...

    @worker.set_post_task_handler
    def after(signature: Signature[object]) -> None: ...

    assert_type(worker.launch(), int)
    on_error(ValueError())
    before(add.signature(1, 2))
    after(add.signature(1, 2))


def run_inside_my_program() -> None:
    with server.new_worker(concurrency=4):
        print(add.send(1, 2).get(timeout=5))


# 14


async def endpoint(user_id: int) -> str:
    result = await report.send_async(f"user {user_id}")
    await group(add.signature(i, i) for i in range(3)).send_async()
    try:
        return await result.get_async(timeout=10)
    except ResultTimeout:
        return "still working"


async def many(urls: list[str]) -> list[str]:
    results = [await fetch.send_async(u) for u in urls]
    return list(await asyncio.gather(*results))


async def twins() -> None:
    assert_type(await add.options(delay=1).send_async(1, 2), AsyncResult[int])
    assert_type(await server.send_task_async(add.signature(1, 2)), AsyncResult[int])
    assert_type(await server.send_chain_async(three), ChainResult[int])
    assert_type(await server.send_group_async(group(add.signature(1, 2))), GroupResult[list[int]])
    assert_type(
        await server.send_chord_async(chord(group(add.signature(1, 2)), multiply.partial())),
        ChordResult[int],
    )
    assert_type(await (await three.send_async()).get_async(), int)
    assert_type(await (await add.signature(1, 2).send_async()), int)
    assert_type(await (await group(add.signature(1, 2)).send_async()), list[int])

    result = await add.send_async(1, 2)
    assert_type(await result.get_state_async(), TaskState)
    assert_type(await result.touch_async(), int | None)
    assert_type(await result.is_finished_async(), bool)
    await result.revoke_async()
    members = await server.send_group_async(group(add.signature(1, 2)), send_concurrency=1)
    assert_type(await members.touch_async(), list[int] | None)
    assert_type(await members.progress_async(), tuple[int, int])
    assert_type(
        await (await group(add.signature(1, 2)).send_async()).progress_async(), tuple[int, int]
    )
    assert_type(await (await three.send_async()).touch_async(), int | None)
    await server.revoke_async([result.uuid])
    await server.close_async()

    assert_type(await server.inspect.queues_async(), list[QueueReport])
    assert_type(
        await server.inspect.tasks_async(state="failed", name="add", since=60, queue="q", limit=5),
        list[TaskState],
    )
    assert_type(await server.inspect.task_async("task_1"), TaskReport)
    assert_type(await server.inspect.retry_async(["task_1"]), list[str])
    assert_type(await server.inspect.dead_async(limit=5), list[DeadLetter])
    assert_type(await server.inspect.purge_async("q"), int)
    await server.inspect.pause_async("q")
    assert_type(await server.schedules.list_async(), list[ScheduleReport])
    await server.schedules.add_async("@daily", "nightly", add.signature(1, 2), catch_up="latest")
    await server.schedules.change_async("nightly", spec="@hourly", overlap="skip")
    assert_type(await server.lock("x").release_async(), bool)
    worker = server.new_worker()
    await worker.start_async()
    assert_type(await worker.stop_async(), bool)


# 15


def signup(email: str) -> None:
    send_welcome.send(email)
    add.options(delay=3600).send(1, 2)


def test_signup_sends_a_mail_now_and_adds_later(machinery: Harness) -> None:
    signup("ada@example.com")

    machinery.assert_sent("send_welcome", "ada@example.com")
    assert machinery.drain() == 1
    assert_type(machinery.drain(raise_failures=False), int)

    machinery.advance(hours=1)
    assert machinery.drain() == 1
    machinery.assert_not_sent("add", 1, 3)
    assert_type(machinery.sent, list[Signature[Any]])
    assert_type(machinery.clock, ManualClock)
    assert_type(machinery.state(add.send(1, 2).uuid), TaskState)
    machinery.clear()
    wait_until(lambda: True)


def test_a_failure_comes_out(machinery: Harness) -> None:
    download.send("ftp://x")

    with pytest.raises(TaskFailed, match="not a web address"):
        machinery.drain()


def test_with_a_real_worker(machinery_worker: Worker) -> None:
    assert add.send(1, 2).get(timeout=5) == 3


def test_the_function_alone() -> None:
    assert add(1, 2) == 3


# 17 and 18

logging.getLogger("machinery_py").setLevel(logging.DEBUG)


@server.around_task
def app_context(signature: Signature[object]) -> Iterator[None]:
    yield


around: Callable[[Signature[object]], Iterator[None]] = app_context


@server.before_task
def mark(ctx: Context) -> None:
    ctx.note(step="begin", pool=ctx.state["pool"])


@server.after_task
async def mark_end(ctx: Context) -> None: ...


@server.on_success
def praise(ctx: Context, result: object) -> None: ...


@server.on_retry
@server.on_failure
def tell(ctx: Context, error: BaseException) -> None: ...


@server.lifespan
def resources() -> Iterator[dict[str, object]]:
    yield {"pool": 1}


@server.lifespan
async def async_resources() -> AsyncIterator[None]:
    yield


tell_it: Callable[[Context, BaseException], None] = tell
assert_type(server.result("task_1").get_state().notes, dict[str, Any])


@server.task(queue="mail", retries=5, backoff="exponential", retry_on=OSError)
def send_mail(to: str, subject: str, text: str) -> None:
    message = EmailMessage()
    message["From"], message["To"], message["Subject"] = "shop@example.com", to, subject
    message["Message-ID"] = f"<{current_task().uuid}@example.com>"
    message.set_content(text)
    try:
        with smtplib.SMTP("localhost", 1025, timeout=10) as smtp:
            smtp.send_message(message)
    except smtplib.SMTPRecipientsRefused as refused:
        code, _ = refused.recipients[to]
        if code >= 500:
            raise NoRetry(f"{to} refused for good: {code}") from refused
        raise RetryTaskLater(f"{to} refused for now: {code}", 300) from refused


@server.periodic("0 8 * * MON", tz="Europe/Berlin")
def newsletter() -> None:
    readers = ["ada@example.com", "bob@example.com"]
    group(send_mail.signature(to, "This week", "…") for to in readers).send()


# 11


@server.periodic(
    "0 6 * * MON-FRI",
    tz="Europe/Berlin",
    catch_up=True,
    overlap="skip",
    dst="go",
    name="digest",
    window=60,
)
@server.task
def morning_digest() -> int:
    return 1


@server.periodic("@every 30s")
def pulse(ctx: Context) -> str:
    return ctx.uuid


@server.periodic("@every 30s")
async def apulse() -> bytes:
    return b""


assert_type(newsletter, Task[[], None])
assert_type(morning_digest, Task[[], int])
assert_type(morning_digest.send().get(), int)
assert_type(pulse.send().get(), str)
assert_type(apulse.send().get(), bytes)

server.register_periodic_task("0 6 * * ?", "nightly", report.signature("today"))
server.register_periodic_chain("@daily", "nightly-chain", add.signature(1, 1), add.partial(2))
server.register_periodic_group(
    "@hourly", "hourly-group", 10, add.signature(1, 1), add.signature(2, 2)
)
server.register_periodic_chord(
    "@weekly", "weekly", 10, multiply.partial(), add.signature(1, 1), catch_up="all"
)


def at_run_time() -> None:
    server.schedules.add(
        "0 7 * * *", "seven", group(add.signature(1, 1)), tz="Europe/Berlin", overlap="queue"
    )
    server.schedules.change("seven", spec="30 7 * * *", window=60)
    for one in server.schedules.list():
        assert_type(one.last_run, dt.datetime | None)


# 12


def locked() -> None:
    with server.lock("feed-7", timeout=5) as lock:
        assert_type(lock.fence, int)
        lock.check()


async def alocked() -> None:
    async with server.lock("feed-7", blocking=False) as lock:
        assert_type(await lock.release_async(), bool)


@server.task(
    unique=True, unique_for=dt.timedelta(minutes=5), unique_until="start", on_duplicate="replace"
)
def rebuild_index(shop_id: int) -> int:
    return shop_id


@server.task("sync", unique=lambda shop_id, reason: f"shop-{shop_id}", queue="slow")
def sync_shop(shop_id: int, reason: str) -> None: ...


@server.task(exclusive="wait", exclusive_key="feed", exclusive_timeout=60)
async def import_feed(feed_id: int) -> str:
    return str(feed_id)


assert_type(rebuild_index.send(7).duplicate, bool)
assert_type(rebuild_index.options(unique="shop-7", on_duplicate="reject").send(7), AsyncResult[int])
assert_type(import_feed.send(7), AsyncResult[str])
waits = import_feed.options(exclusive="wait", exclusive_key="feed", exclusive_timeout=60)
assert_type(waits.send(7), AsyncResult[str])


@server.task(debounce=5, unique_key="shop_id")
def index(shop_id: int) -> None: ...


@server.task(batch=100)
def doubled(rows: list[int]) -> list[str]:
    return [str(2 * row) for row in rows]


@server.task("kept", batch=100, batch_within=dt.timedelta(seconds=2), retries=3)
async def keep(ctx: Context, rows: list[str]) -> None:
    assert_type(ctx.calls, Sequence[Signature[Any]])
    raise BatchFailed({0: ValueError(rows[0])}, results=[None])


assert_type(doubled.send(7), AsyncResult[str])
assert_type(keep.options(queue="slow").send("a"), AsyncResult[None])
doubled([1, 2])


@server.task
def onboard(user_id: int) -> str:
    task = current_task()
    assert_type(task.step("count", len, [user_id]), int)
    assert_type(task.step("add", add, user_id, 2), int)
    assert_type(task.step("mail", _mail, user_id, kind="welcome"), list[str])
    in_transaction = task.step("mail", transaction=True)
    assert_type(in_transaction(_mail, user_id, kind="welcome"), list[str])
    return task.step_key


async def onboard_async(user_id: int) -> None:
    assert_type(await current_task().step_async("mail", _mail_async, user_id), list[str])


def _mail(user_id: int, *, kind: str) -> list[str]:
    return [kind] * user_id


async def _mail_async(user_id: int) -> list[str]:
    return [str(user_id)]
