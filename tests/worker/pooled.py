"""An app whose tasks run in processes, for test_processes.py. `trace` is a folder of the test."""

from __future__ import annotations

import asyncio
import ctypes
import datetime as dt
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from machinery_py import (
    BatchFailed,
    Context,
    Retry,
    RetryTaskLater,
    Server,
    TaskFailed,
    TimeLimitExceeded,
    current_task,
)
from machinery_py.worker.processes import frames
from machinery_py.worker.processes.child import SIGNAL, JobLoop
from machinery_py.worker.running.runner import Run

server = Server("memory://")

if os.environ.get("POOLED_DIES_READING"):  # as a process that has no memory for its task

    def _die(number: int, count: int) -> bytes:
        chunk = _read(number, count)
        if len(chunk) == frames.CHUNK:
            os._exit(9)
        return chunk

    _read, os.read = os.read, _die

if awaited := os.environ.get("POOLED_STARTS_WITH"):
    while not os.path.exists(awaited):
        time.sleep(0.01)

if os.environ.get("POOLED_SIGNALS_LATE"):  # the order is there before the call; the signal behind

    def _late(frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        if frame.f_code is JobLoop._report.__code__:
            while frame.f_locals["self"]._order is None:
                time.sleep(0.01)
        elif frame.f_code is Run.failed.__code__:
            signal.raise_signal(SIGNAL)

    sys.setprofile(_late)

LONG = 3600.0  # seconds; the end of such a call comes from outside


def _begin(trace: str) -> int:
    """Note this run; return how many runs there were before."""
    runs = len(os.listdir(trace))
    (Path(trace) / f"{runs}-{os.getpid()}").touch()
    return runs


MARKS: list[str] = []


@server.lifespan
def resources() -> Iterator[dict[str, int]]:
    if os.environ.get("POOLED_FAILS_OUTSIDE", str(os.getpid())) != str(os.getpid()):
        raise OSError("no connection")
    yield {"process": os.getpid()}


@server.before_task
def mark(ctx: Context) -> None:
    MARKS.append(ctx.name)


@server.after_task
async def mark_end(ctx: Context) -> None:
    MARKS.append(f"after {ctx.name}")


@server.task(pool="process")
def around(ctx: Context) -> list[str]:
    return [str(ctx.state["process"]), str(os.getpid()), *MARKS[-2:]]


@server.task(pool="process")
def where() -> int:
    return os.getpid()


@server.task(pool="process", batch=3, batch_within=0.3)
def together(ctx: Context, rows: list[str]) -> list[str]:
    if "die" in rows:
        os.kill(os.getpid(), signal.SIGKILL)
    if "raise" in rows:
        raise BatchFailed({rows.index("raise"): ValueError(ctx.calls[0].uuid)}, rows)
    ctx.progress(1, 2)
    return [f"{row} of {len(rows)}" for row in rows]


@server.task(pool="process", batch=2, batch_within=0.3, time_limit=0.5)
async def together_for_long(rows: list[str]) -> None:
    await asyncio.sleep(LONG)


@server.task(pool="thread")
def here() -> int:
    return os.getpid()


@server.task
def anywhere() -> int:
    return os.getpid()


@server.task(pool="process")
async def where_async() -> int:
    await asyncio.sleep(0)
    return os.getpid()


@server.task(pool="process")
def about(ctx: Context) -> list[str]:
    ctx.progress(1, 2)
    ctx.note(step="one")
    ctx.note(rows=2)
    return [ctx.uuid, ctx.name, ctx.worker, current_task().queue, str(ctx.attempt)]


@server.task(pool="process")
def fail(text: str) -> None:
    raise ValueError(text)


FAR = dt.datetime.max.replace(tzinfo=dt.timezone(dt.timedelta(hours=-12)))
ODD_RETRIES: dict[str, dict[str, Any]] = {
    "surrogate": {"queue": "\ud800"},
    "reserved": {"queue": "mpy:x"},
    "no-text": {"queue": 5},
    "misfit": {"args": (1, 2)},
    "no-list": {"args": 5},
    "retries": {"retries": 2**70},
    "far": {"eta": FAR},
    "naive": {"eta": FAR.replace(tzinfo=None)},
    "nan": {"delay": math.nan},
}


def ask_oddly(how: str) -> None:
    raise Retry(**ODD_RETRIES[how])


ask_in_process = server.task("ask_in_process", pool="process", backoff=[0.0])(ask_oddly)
ask_in_thread = server.task("ask_in_thread", pool="thread", backoff=[0.0])(ask_oddly)


@server.task(pool="process")
def leave() -> None:
    sys.exit(3)


@server.task(pool="process", retries=1)
def later(trace: str) -> str:
    if _begin(trace) == 0:
        raise RetryTaskLater("not yet", 0.0)
    return current_task().headers["machinery_postponed"]


@server.task(pool="process")
def die_once(trace: str, how: str) -> int:
    if _begin(trace) > 0:
        return current_task().attempt
    if how == "closes its descriptors":
        os.closerange(3, 256)
    elif how == "opens files in their place":
        os.closerange(3, 256)
        for _ in range(64):
            os.open(Path(trace).with_suffix(".mine"), os.O_RDWR | os.O_CREAT)
    elif how == "forks":
        if (forked := os.fork()) == 0:
            time.sleep(LONG)
        Path(trace).with_suffix(".forked").write_text(str(forked))
        os._exit(1)
    elif how.startswith("exit"):
        os._exit(int(how[-1]))
    else:
        os.kill(os.getpid(), signal.Signals[how])
    return 0


@server.task(pool="process", max_running=1)
def alone(trace: str, name: str) -> str:
    inside = Path(trace) / "inside"
    inside.touch(exist_ok=False)
    first = Path(trace) / name
    if name == "dies" and not first.exists():
        first.touch()
        inside.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2)
    inside.unlink()
    return name


@server.task(pool="process")
def die(trace: str) -> None:
    _begin(trace)
    os.kill(os.getpid(), signal.SIGKILL)


@server.task(pool="process", time_limit=0.2)
def sleeps() -> None:
    time.sleep(LONG)


@server.task(pool="process", time_limit=0.2)
def sleeps_and_saves() -> str:
    try:
        time.sleep(LONG)
    except TimeLimitExceeded:
        return "saved"
    return ""


@server.task(pool="process", time_limit=0.2)
async def sleeps_async() -> None:
    await asyncio.sleep(LONG)


@server.task(pool="process", time_limit=2.0, kill_after=0.2, retries=1)
def stuck(trace: str) -> int:
    if _begin(trace) > 0:
        return current_task().attempt
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    ctypes.PyDLL(None).sleep(3600)  # holds the interpreter's lock
    return 0


@server.task(pool="process")
def holds(trace: str) -> str:
    if _begin(trace) == 0:
        ctypes.PyDLL(None).sleep(3600)
    return "done"


@server.task(pool="process")
def until_cancelled(trace: str) -> str:
    _begin(trace)
    while not current_task().cancelled:
        time.sleep(0.01)
    return "stopped"


@server.task(pool="process", time_limit=30 * 86_400.0)
def within_a_month() -> str:
    time.sleep(0.05)  # long enough to be waited for
    return "done"


@server.task(pool="process")
def grow(size: int) -> int:
    _grown.append(b"x" * size)
    return os.getpid()


_grown: list[bytes] = []


@server.task(pool="process", time_limit=0.02, kill_after=0.0)
def just_in_time(number: int) -> int:
    time.sleep(0.02)
    return number


@server.task(pool="process")
def ask_behind_the_back() -> None:
    retry = Retry()
    retry.retries = 2**70  # as a subclass may do
    raise retry


@server.task(pool="process")
def dies_traced(trace: str) -> str:
    if _begin(trace) > 0:
        return "run again"
    libc = ctypes.CDLL(None)
    libc.prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)  # anybody may trace it (Yama)
    seize = f"ctypes.CDLL(None).ptrace(0x4206, {os.getpid()}, None, None)"
    tracer = subprocess.Popen(
        [sys.executable, "-c", f"import ctypes, time; print({seize}, flush=True); time.sleep(60)"],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    Path(trace).with_suffix(".tracer").write_text(str(tracer.pid))
    assert tracer.stdout is not None
    assert tracer.stdout.readline() == b"0\n"
    os._exit(3)


@server.task(pool="process")
def leaves_a_fork(trace: str) -> str:
    if _begin(trace) > 0:
        return "run again"
    libc = ctypes.PyDLL(None)
    if (forked := libc.fork()) == 0:  # Python does not know of it, so it keeps all pipes
        libc.setsid()
        libc.sleep(3600)
        os._exit(0)
    Path(trace).with_suffix(".forked").write_text(str(forked))
    os._exit(3)


@server.task(pool="process")
def swallow(text: str) -> int:
    return len(text)


def _step(trace: str, name: str) -> str:
    (Path(trace) / f"{name}-{time.monotonic_ns()}").touch()
    return current_task().step_key


async def _step_async(trace: str, name: str) -> str:
    return _step(trace, name)


@server.task(pool="process")
def steps(trace: str) -> list[str]:
    task = current_task()
    first = task.step("first", _step, trace, "first")
    if not task.signature.strikes:
        os.kill(os.getpid(), signal.SIGKILL)
    return [first, task.step("second", _step, trace, "second")]


@server.task(pool="process")
async def steps_async(trace: str) -> list[str]:
    task = current_task()
    first = await task.step_async("first", _step_async, trace, "first")
    if not task.signature.strikes:
        os.kill(os.getpid(), signal.SIGKILL)
    return [first, await task.step_async("second", _step_async, trace, "second")]


@server.task(pool="process")
def suspended(trace: str) -> list[str]:
    task = current_task()
    first = task.step("first", _step, trace, "first")
    task.sleep(0.2)
    return [first, task.step("second", _step, trace, "second")]


@server.task(pool="process")
def told(trace: str) -> object:
    task = current_task()
    task.step("first", _step, trace, "first")
    return task.wait_for("approval", timeout=60)


@server.task(pool="process")
def asks(trace: str) -> list[object]:
    task = current_task()
    keys = task.wait_for(steps_async.signature(trace))
    try:
        task.wait_for(no_steps.signature(trace))
    except TaskFailed as error:
        return [keys, error.error_type]
    return []


@server.task(pool="process", on_worker_lost="fail")
def no_steps(trace: str) -> str:
    return current_task().step("first", _step, trace, "first")
