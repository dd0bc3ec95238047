"""Application that the suites run: a Server with some tasks, and helpers to observe it."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterator
from typing import Any, Final

import pytest

from machinery_py import Server, State, Worker, current_task
from machinery_py.testing.waiting import HANG, wait_until

THREADS = 4


class App:
    """Server with some tasks.

    `calls` has the arguments of their calls; `gate(name)` holds tasks that wait for it.

    Args:
        first: another App, whose calls and gates are shared.
    """

    def __init__(self, server: Server, first: App | None = None) -> None:
        self.server = server
        self.calls: list[tuple[Any, ...]] = first.calls if first is not None else []
        self.gates: dict[str, threading.Event] = first.gates if first is not None else {}
        self.add: Final = server.task(_add)
        self.multiply: Final = server.task(_multiply)
        self.echo: Final = server.task(_echo)
        self.pair: Final = server.task(_pair)
        self.total: Final = server.task(_total)
        self.fetch: Final = server.task(_fetch)
        self.note: Final = server.register_task("note", self._note)
        self.fail: Final = server.register_task("fail", self._fail)
        self.wait: Final = server.register_task("wait", self._wait)
        self.count: Final = server.register_task("count", self._count)

    def _note(self, *args: Any) -> None:
        self.calls.append(args)

    def _fail(self, text: str, *rest: Any) -> int:
        self.calls.append(("fail", text))
        raise ValueError(text)

    def _count(self, *args: Any) -> int:
        return len(args)

    def _wait(self, name: str) -> str:
        self.calls.append(("wait", name))
        if not self.gate(name).wait(HANG):
            raise TimeoutError(f"nobody opened gate {name!r}")
        return name

    def gate(self, name: str) -> threading.Event:
        return self.gates.setdefault(name, threading.Event())

    def running(self, **options: Any) -> Worker:
        """Return a worker, for `with`."""
        options = {"concurrency": THREADS, "shutdown_timeout": HANG, **options}
        return self.server.new_worker(**options)

    def another(self) -> App:
        """Return the same application with another Server on the same stores: a second process."""
        return App(Server(self.server.config), self)

    def wait_until_idle(self) -> None:
        """Return when nothing waits, is delayed or runs, and no group waits for its callback."""
        store = self.server.app.store

        def is_idle() -> bool:
            queues = self.server.inspect.queues()
            return not any(one.waiting + one.delayed + one.running for one in queues)

        # Queues first and last: the end of a task makes a group ready, which then fills a queue.
        wait_until(
            lambda: is_idle() and not store.ready_groups(1) and is_idle(), what="empty queues"
        )

    def wait_for(self, tag: str) -> list[tuple[Any, ...]]:
        """Return the calls of `note` whose last argument is the tag.

        Waits until there is one and no task is left to run.
        """
        wait_until(
            lambda: any(call[-1:] == (tag,) for call in self.calls), what=f"a call with {tag!r}"
        )
        self.wait_until_idle()
        return [call for call in self.calls if call[-1:] == (tag,)]

    def wait_for_state(self, uuid: str, state: State) -> None:
        """Wait until the task is in this state; it may be unknown at first."""

        def reached() -> bool:
            found = self.server.backend.get_states([uuid]).get(uuid)
            return found is not None and found.state is state

        wait_until(reached, what=f"{state} of {uuid}")

    def close(self) -> None:
        for gate in self.gates.values():
            gate.set()
        self.server.close()


class AppCase:
    """Fixtures with the application of a suite."""

    @pytest.fixture
    def server(self) -> Iterator[Server]:
        raise NotImplementedError("the subclass gives a fixture `server`")

    @pytest.fixture
    def idle(self, server: Server) -> Iterator[App]:
        """Return the application without a worker."""
        app = App(server)
        yield app
        app.close()

    @pytest.fixture
    def app(self, idle: App) -> Iterator[App]:
        """Return the application, with a worker in threads."""
        with idle.running():
            yield idle
            for gate in idle.gates.values():
                gate.set()


def waiting(app: App, **options: Any) -> Any:
    """Register the task `hold` with these options; it records its call and waits for its gate."""

    def hold(name: str, *rest: Any) -> str:
        app.calls.append(("hold", name, *rest))
        if not app.gate(name).wait(HANG):
            raise TimeoutError(name)
        return name

    return app.server.task(**options)(hold)


def _add(a: int, b: int, *more: int) -> int:
    return a + b + sum(more)


def _multiply(*numbers: int) -> int:
    return math.prod(numbers)


def _echo(value: Any) -> Any:
    return value


def _pair(a: str, b: int) -> tuple[str, int]:
    return a, b


def _total(numbers: list[int]) -> int:
    return sum(numbers)


async def _fetch(url: str) -> str:
    await asyncio.sleep(0)
    return f"{current_task().name} {url}"


for _function in (_add, _multiply, _echo, _pair, _total, _fetch):
    _function.__name__ = _function.__name__.removeprefix("_")
