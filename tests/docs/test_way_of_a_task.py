"""docs/explanation/way-of-a-task.md, compared with a trace of one task on a real Redis."""

from __future__ import annotations

import pathlib
import re
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

import pytest

import machinery_py
from machinery_py import Server
from machinery_py.testing.waiting import HANG, wait_until
from machinery_py.worker.loops import settler
from tests.support.servers import RedisServer, require

PACKAGE = pathlib.Path(machinery_py.__file__).parent
PAGE = PACKAGE.parent / "docs" / "explanation" / "way-of-a-task.md"
MOST_SENDING, MOST_RUNNING = 14, 24  # files


class Call(NamedTuple):
    """A call of a function; files are named as in the package."""

    file: str
    function: str
    caller: str


class Trace:
    """Calls of functions of the package, by the name of their thread, while it is `on`."""

    def __init__(self) -> None:
        self.on = False
        self.calls: defaultdict[str, list[Call]] = defaultdict(list)

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if not self.on or event != "call":
            return
        call = Call(file_of(frame), frame.f_code.co_name, file_of(frame.f_back))
        if call.file and not any(file.startswith("testing/") for file in (call.file, call.caller)):
            self.calls[threading.current_thread().name].append(call)

    def of(self, thread: str) -> list[Call]:
        return next((calls for name, calls in self.calls.items() if name.endswith(thread)), [])

    def ends(self, thread: str, function: str) -> bool:
        """Return whether the last call in this thread is of this function."""
        calls = self.of(thread)
        return bool(calls) and calls[-1].function == function


def file_of(frame: FrameType | None) -> str:
    """Return the file of a frame, "" if it is outside of the package."""
    path = pathlib.Path(frame.f_code.co_filename if frame is not None else "")
    return path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else ""


def files(calls: list[Call]) -> list[str]:
    return list(dict.fromkeys(call.file for call in calls))


def round_trips(calls: list[Call]) -> int:
    return sum(call[:2] == ("connections/redis/connection.py", "send") for call in calls)


def listed(title: str) -> list[str]:
    """Return the files in the table under this title of the page."""
    _, _, rest = PAGE.read_text().partition(f"# {title}\n")
    section = rest.partition("\n#")[0]
    return re.findall(r"^\| `([\w/]+\.py)` \|", section, re.MULTILINE)


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    require(RedisServer)
    with RedisServer() as server:
        yield server


@pytest.fixture
def trace() -> Iterator[Trace]:
    trace = Trace()
    threading.setprofile(trace)
    yield trace
    threading.setprofile(None)


@pytest.fixture
def server(redis: RedisServer) -> Iterator[Server]:
    redis.cli("FLUSHALL")
    server = Server(redis.url)
    server.register_task("add", add)
    yield server
    server.close()


def add(x: int, y: int) -> int:
    return x + y


def test_sending_goes_the_way_of_the_page(server: Server, trace: Trace) -> None:
    task = server.get_registered_task("add")
    for _ in range(3):
        task.send(1, 2)

    sys.setprofile(trace)
    trace.on = True
    task.send(1, 2)
    trace.on = False
    sys.setprofile(None)

    [calls] = trace.calls.values()
    assert files(calls) == listed("Sending")
    assert len(files(calls)) <= MOST_SENDING
    assert round_trips(calls) == 1
    entries = [call for call in calls if (call.caller, call.file) == ("server.py", "app.py")]
    assert [call.function for call in entries] == ["submit"]


def test_running_goes_the_way_of_the_page(
    server: Server, trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settler, "MARK_DELAY", HANG)  # a mark that is late would come in between

    def add_when_marked(x: int, y: int) -> int:
        wait_until(lambda: not trace.on or trace.ends("settler", "_gather"), HANG, "a mark")
        return x + y

    task = server.register_task("add_when_marked", add_when_marked)
    with server.new_worker("w", concurrency=1) as worker:

        def run(number: int) -> None:
            task.send(1, 2).get(timeout=HANG)
            wait_until(lambda: worker.processed == number, HANG, "the end of the task")
            if trace.on:
                wait_until(lambda: trace.ends("settler", "_gather"), HANG, "the settler to wait")
                wait_until(lambda: trace.ends("w-1", "_is_full"), HANG, "the executor to wait")

        for number in (1, 2, 3):
            run(number)
        trace.on = True
        run(4)
        # The receiver is in its next claim now, which gets the task that counts.
        trace.calls = defaultdict(list, {"w-receiver": trace.of("receiver")})
        run(5)
        trace.on = False

    claim = last_claim(trace.of("receiver"))
    assert files(claim) == listed("The receiver claims")
    assert files(trace.of("w-1")) == listed("An executor calls the function")
    assert files(trace.of("settler")) == listed("The settler commits")
    together = files([*claim, *trace.of("w-1"), *trace.of("settler")])
    assert len(together) <= MOST_RUNNING
    assert round_trips(trace.of("w-1")) == 0
    assert round_trips(trace.of("settler")) == 1


def last_claim(calls: list[Call]) -> list[Call]:
    """Return the receiver's round that got a message, from its first call to the last."""
    starts = [at for at, call in enumerate(calls) if call.function == "_free"]
    rounds = [calls[one:two] for one, two in zip(starts, [*starts[1:], len(calls)], strict=True)]
    return [one for one in rounds if any(call.function == "accept" for call in one)][-1]
