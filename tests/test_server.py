"""Small promises, each of which was broken once."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Iterator

import pytest

from machinery_py import (
    Server,
    Signature,
    State,
    TaskFailed,
    Unsupported,
    current_task,
    group,
)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server("eager")
    yield server
    server.close()


def test_context_of_a_raising_coroutine_task_is_left(server: Server) -> None:
    left: list[str] = []

    @server.around_task
    def around(signature: Signature[object]) -> Iterator[None]:
        try:
            yield
        finally:
            left.append(signature.name)

    @server.task
    async def broken() -> None:
        raise ValueError("broken")

    with pytest.raises(TaskFailed):
        broken.send().get(timeout=0)
    assert left == ["broken"]


def test_a_generator_that_never_yields_says_so(server: Server) -> None:
    @server.around_task
    def around(signature: Signature[object]) -> Iterator[None]:
        if signature.name == "never":
            yield

    @server.task
    def calm() -> None: ...

    with pytest.raises(TaskFailed, match="generator didn't yield"):
        calm.send().get(timeout=0)


def test_a_failed_task_that_is_sent_again_has_all_its_tries(server: Server) -> None:
    attempts: list[int] = []

    @server.task(retries=2)
    def flaky() -> str:
        attempts.append(current_task().attempt)
        if len(attempts) < 6:
            raise ValueError("not yet")
        return "done"

    result = flaky.send()
    assert result.get_state().state is State.FAILURE

    assert server.inspect.retry([result.uuid]) == [result.uuid]

    assert attempts == [1, 2, 3, 1, 2, 3]
    assert server.result(result.uuid).get(timeout=0) == "done"


def test_the_fence_grows_over_retries(server: Server) -> None:
    fences: list[int] = []

    @server.task(retries=2)
    def fenced() -> None:
        fences.append(current_task().fence)
        if len(fences) < 3:
            raise ValueError("again")

    fenced.send().get(timeout=0)
    assert fences == sorted(set(fences))


def test_a_moment_without_a_zone_is_refused_everywhere(server: Server) -> None:
    task = server.register_task("plain", lambda: None)
    naive = dt.datetime(2027, 1, 1)

    with pytest.raises(ValueError, match="plain: eta=.* a datetime with a time zone"):
        task.options(eta=naive).send()
    with pytest.raises(ValueError, match="plain: expires=.* a datetime with a time zone"):
        task.options(expires=naive).send()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"retries": -1}, "retries=-1"),
        ({"priority": 256}, "priority=256"),
        ({"time_limit": 0}, "time_limit=0"),
        ({"retries": 1.5}, "retries=1.5"),
        ({"retries": 2**31}, "retries=2147483648"),
        ({"unique_for": -1}, "unique_for=-1"),
        ({"retries": "3"}, "retries='3'"),
        ({"priority": None}, "priority=None"),
        ({"time_limit": "5"}, "time_limit='5'"),
        ({"time_limit": math.inf}, "time_limit=inf"),
        ({"time_limit": math.nan}, "time_limit=nan"),
        ({"pool": "fork"}, r"pool='fork' \(expected 'thread' or 'process'\)"),
        ({"pool": "process", "kill_after": 5}, r"kill_after=5 \(it needs a time_limit"),
        ({"pool": "thread", "time_limit": 1, "kill_after": 5}, "a thread cannot be killed"),
        ({"pool": "process", "time_limit": 1, "kill_after": -1}, r"kill_after=-1 \(expected"),
        ({"backoff": "fibo"}, "backoff 'fibo'"),
        ({"backoff": []}, "backoff is empty"),
        (
            {"backoff": 0.01},
            r"odd: backoff 0\.01: unknown \(known: .*a list of seconds.*did you mean \[0\.01\]\?\)",
        ),
        ({"backoff": None}, r"odd: backoff None: unknown \(known: .*a function\)"),
        ({"backoff": dt.timedelta(seconds=1)}, "odd: backoff datetime.timedelta.*unknown"),
        ({"backoff": ["1"]}, "found '1'"),
        ({"retry_on": "OSError"}, "odd: retry_on='OSError' \\(expected exception classes"),
        (
            {"retry_on": (OSError("x"),)},
            r"retry_on=\(OSError\('x'\),\) \(expected exception classes",
        ),
        ({"retry_on": [OSError, 5]}, r"retry_on=\[<class 'OSError'>, 5\] \(expected"),
    ],
)
def test_invalid_settings_are_refused_where_they_are_written(
    server: Server, options: dict[str, object], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        server.task("odd", **options)(lambda: None)  # type: ignore[call-overload]

    assert not server.is_task_registered("odd")


def test_errors_that_are_retried_may_be_listed(server: Server) -> None:
    @server.task(retries=1, backoff=[0.0], retry_on=[OSError, ValueError])
    def flaky() -> int:
        if current_task().attempt == 1:
            raise ValueError("not yet")
        return current_task().attempt

    assert flaky.send().get(timeout=0) == 2


def test_a_coroutine_task_runs_inside_a_running_loop(server: Server) -> None:
    import asyncio

    @server.task
    async def double(number: int) -> int:
        await asyncio.sleep(0)
        return 2 * number

    async def main() -> int:
        return await (await double.send_async(21))

    assert asyncio.run(main()) == 42


def test_server_is_shown_with_its_stores_and_without_passwords() -> None:
    server = Server("redis://:secret@host/0", result_backend="memcache://other:11211")
    server.task(print)

    assert repr(server) == (
        "<Server broker='redis://***@host/0' result_backend='memcache://other:11211', 1 tasks>"
    )


def test_config_of_a_server_is_one_object(server: Server) -> None:
    assert server.config is server.config is server.app.config


def test_message_group_is_refused_where_no_order_is_kept(server: Server) -> None:
    grouped = server.task(print).signature().replace(broker_message_group_id="orders")
    with pytest.raises(Unsupported, match="print: broker_message_group_id='orders': the broker"):
        server.send_task(grouped)
    for step in (group(grouped, grouped), Signature.of("other") | grouped):
        with pytest.raises(Unsupported, match="keeps no order within groups"):
            server.send(step)
    unique = server.task("once", unique=True)(print).signature()
    with pytest.raises(Unsupported, match="keeps no order within groups"):
        server.send_task(unique.replace(broker_message_group_id="orders"))
