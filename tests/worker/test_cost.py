"""Cost of a plain task, counted, since time cannot be asserted on a shared machine."""

import dis
import gc
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import machinery_py
from machinery_py import Server
from machinery_py.config.config import Config
from machinery_py.worker.running import execution
from machinery_py.worker.running.execution import Execution
from machinery_py.worker.running.runner import Run

TASKS = 1_000
# Python calls for a task: 60 when this was written, and 65 since the lease, the bytes and the guard
# of a call are looked at; look at benchmarks before you raise it.
MOST = 69

PACKAGE = str(Path(machinery_py.__file__).parent)
STORE = (
    *(f"{PACKAGE}/{folder}/" for folder in ("brokers", "backends", "connections", "rows")),
    f"{PACKAGE}/fences.py",
)


def test_plain_task_makes_few_python_calls() -> None:
    """With late ack, in a thread, no hooks, no events, no log lines; without the store's calls.

    The least of three rounds: on a busy machine batches are small, and cost more calls a task.
    """
    rounds = [calls_of_a_round() for _ in range(3)]
    calls = min(rounds, key=lambda one: sum(one.values()))

    each = {name: number / TASKS for name, number in calls.most_common() if number >= TASKS / 4}
    assert each["runner.py:run_here"] == 1
    assert sum(calls.values()) / TASKS <= MOST, each


def calls_of_a_round() -> Counter[str]:
    server = Server(config=Config(broker="memory://", result_backend="memory://", log_tasks=False))

    @server.task
    def no_op(number: int) -> int:
        return number

    for number in range(TASKS):
        no_op.send(number)
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        is_ours = file.startswith(PACKAGE) and not file.startswith(STORE)
        # Maintenance looks at all that is held once a second, however many tasks run in it.
        if event == "call" and is_ours and threading.current_thread().name != "w-maintenance":
            calls[f"{Path(file).name}:{frame.f_code.co_name}"] += 1

    worker = server.new_worker("w", concurrency=4, burst=True)
    thread = threading.Thread(target=lambda: worker.launch(signals=False))
    threading.setprofile(count)
    try:
        thread.start()
        thread.join()
    finally:
        threading.setprofile(None)
        server.close()
    return calls


@pytest.mark.parametrize("function", [execution._settlement, Execution.mark, Run.new_context])
def test_records_of_a_task_are_not_made_through_a_dict(function: Callable[..., object]) -> None:
    """A call with more than 15 keywords is, which made one state as dear as five."""
    assert "CALL_FUNCTION_EX" not in {one.opname for one in dis.get_instructions(function)}


@pytest.mark.parametrize("has_handler", [False, True])
def test_task_leaves_nothing_to_the_garbage_collector(has_handler: bool) -> None:
    """Cycles would be kept until a collection, and cost more of them the faster tasks are."""
    server = Server(config=Config(broker="memory://", result_backend="memory://", log_tasks=False))

    @server.task
    def no_op(number: int) -> int:
        return number

    if has_handler:
        server.on_success(lambda ctx, result: None)
    for number in range(TASKS):
        no_op.send(number)
    worker = server.new_worker("w", concurrency=4, burst=True)
    gc.collect()
    gc.disable()
    try:
        worker.launch(signals=False)
        left = sum(type(one) is Execution for one in gc.get_objects())
    finally:
        gc.enable()
        server.close()
    assert left < TASKS / 10  # the last batches may still be in a frame
