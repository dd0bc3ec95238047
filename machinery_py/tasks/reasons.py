"""Reasons why a task has not ended: the answer to `server.inspect.why` and `result.why`."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from machinery_py.tasks.states import State
from machinery_py.texts import length


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that holds a task.

    Attributes:
        cause: for programs; one of CAUSES.
        text: for people.
        hint: a command that looks closer, or helps; "": there is none.
    """

    cause: str
    text: str
    hint: str = ""


#: What a Reason's `cause` may be.
CAUSES = frozenset(
    (
        "ended", "running", "worker gone", "worker stalled", "revoked", "expired", "paused",
        "no worker", "unknown task", "behind", "limit", "lock", "delayed", "retried", "held",
        "outbox", "members", "signal", "task", "beyond", "store away", "not found",
    )
)  # fmt: skip


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """Reasons that hold a task, or a group.

    Attributes:
        name: of the task, with its arguments where its message is known; "": of a group.
        seconds: since it was sent; of one that runs, since it began. None: unknown.
        reasons: all that were found, the most telling first.
        others: how many more tasks are waited for, by a result of several.
    """

    uuid: str
    name: str = ""
    state: State = State.PENDING
    seconds: float | None = None
    reasons: Sequence[Reason] = ()
    others: int = 0

    def __str__(self) -> str:
        """Return a line for the task, and below it one for each reason and hint."""
        does = {State.STARTED: "runs", State.SUCCESS: "has ended", State.FAILURE: "has failed"}
        since = f" for {length(self.seconds)}" if self.seconds is not None else ""
        verb = does.get(self.state, "waits")
        if self.state.is_finished:
            since = f", {length(self.seconds)} ago" if self.seconds is not None else ""
        more = f" (and {self.others:,} more)" if self.others else ""
        lines = [f"{' '.join(filter(None, (self.uuid, self.name)))} {verb}{since}{more}:"]
        for one in self.reasons:
            lines.append(f"  {one.text}")
            lines += [f"  → {one.hint}"] if one.hint else []
        return "\n".join(lines)
