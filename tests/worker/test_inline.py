"""Tasks that run in their caller's thread: the eager store, and what Ctrl+C does there."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator

import pytest

from machinery_py import Server, State, Task


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt, also where the runner of the tests ignores it."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


def press_ctrl_c() -> None:
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


@pytest.mark.parametrize("kind", ["function", "coroutine", "batch"])
def test_ctrl_c_fails_the_eager_task_and_reaches_the_caller(kind: str) -> None:
    server = Server("eager")
    calls: list[str] = []

    def wait(which: str) -> None:
        calls.append(which)
        if which == "first":
            press_ctrl_c()
            threading.Event().wait(30)

    async def wait_async(which: str) -> None:
        calls.append(which)
        if which == "first":
            press_ctrl_c()
            await asyncio.sleep(30)

    def wait_all(which: list[str]) -> None:
        for one in which:
            wait(one)

    match kind:
        case "function":
            task: Task[..., None] = server.task(wait)
        case "coroutine":
            task = server.task(wait_async)
        case _:
            task = server.task(batch=10)(wait_all)

    with pytest.raises(KeyboardInterrupt):
        task.send("first")
    second = task.send("second")

    assert calls == ["first", "second"]  # nor is the first one run again
    assert second.get_state().state is State.SUCCESS
    [failed] = server.inspect.tasks(state=State.FAILURE)
    assert failed.error == "KeyboardInterrupt"
