"""Small promises, each of which was broken once."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator

import pytest

from machinery_py import Server, Signature, State, TaskFailed, current_task


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server("eager")
    yield server
    server.close()


def test_what_stands_around_a_coroutine_task_is_left_when_it_raises(server: Server) -> None:
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

    with pytest.raises(ValueError, match="eta .* has no time zone"):
        task.options(eta=naive).send()
    with pytest.raises(ValueError, match="expires .* has no time zone"):
        task.options(expires=naive).send()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"retries": -1}, "retries=-1"),
        ({"priority": 256}, "priority=256"),
        ({"time_limit": 0}, "time_limit=0"),
        ({"backoff": "fibo"}, "backoff 'fibo'"),
        ({"backoff": []}, "backoff is empty"),
    ],
)
def test_settings_that_make_no_sense_are_refused_where_they_are_written(
    server: Server, options: dict[str, object], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        server.task("odd", **options)(lambda: None)  # type: ignore[call-overload]


def test_a_coroutine_task_runs_inside_a_running_loop(server: Server) -> None:
    import asyncio

    @server.task
    async def double(number: int) -> int:
        await asyncio.sleep(0)
        return 2 * number

    async def main() -> int:
        return await (await double.send_async(21))

    assert asyncio.run(main()) == 42
