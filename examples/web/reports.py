"""A report that takes a while, and what the web applications show of it."""

import time
from typing import Any

from machinery_py import Context, Server, State, StateNotFound, TaskState

MAX_ROWS = 1000

server = Server()  # MACHINERY_URL, or the file machinery.db in this folder


@server.task
def report(ctx: Context, rows: int) -> str:
    for _row in ctx.track(range(rows)):
        time.sleep(0.02)  # the work on a row
    return f"a report of {rows} rows"


def shown(state: TaskState) -> dict[str, Any]:
    """Return what a client sees of a report.

    Raises:
        StateNotFound: the task is another one.
    """
    if state.task_name != report.name:  # its UUID opens reports only
        raise StateNotFound(state.task_uuid)
    return {
        "id": state.task_uuid,
        "state": state.state,
        "progress": state.progress,  # (done, total), or None
        "result": state.results[0].value if state.state is State.SUCCESS else None,
    }
