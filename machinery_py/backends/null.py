"""A backend that keeps nothing: for tasks whose results nobody wants.

Limits: states cannot be read. Groups with a callback are refused, since nobody would count their
members. (Go calls the callback once for each member, without results.)
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Sequence

from machinery_py.backends.base import (
    SETTLED,
    Backend,
    BackendFeatures,
    Begun,
    Change,
    Listener,
    OutboxBackend,
    ReadyGroup,
    Verdict,
)
from machinery_py.clock import Clock
from machinery_py.errors import Unsupported
from machinery_py.tasks.signature import RunNumber
from machinery_py.tasks.states import GroupMeta, TaskState


class NullBackend(Backend, OutboxBackend):
    """Accepts every change and forgets it."""

    features: BackendFeatures = BackendFeatures(
        name="null",
        durable=False,
        shared=False,
        embedded=False,
        listing=False,
        conditional=False,
        keeps=False,
        revocations=False,
        schedules=False,
    )

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def now(self) -> dt.datetime:
        return self._clock.now()

    def apply(self, changes: Sequence[Change]) -> list[Verdict]:
        self.refuse_riders(changes)
        for change in changes:
            # The record of a workflow is forgotten as everything is; it has no members to count.
            if change.arrivals or change.fires or not all(one.plan for one in change.groups):
                raise Unsupported(
                    "the null backend cannot count the members of a group "
                    "(name a result backend, or send the tasks one by one)"
                )
        return [SETTLED] * len(changes)

    def begin(self, keys: Sequence[tuple[str, RunNumber]]) -> list[Begun]:
        return [Begun()] * len(keys)

    def outboxes(self, keys: Sequence[str]) -> list[Sequence[bytes]]:
        return [()] * len(keys)

    def clear_outbox(self, sent: Sequence[tuple[str, Sequence[bytes]]]) -> None:
        pass  # there is none

    def unsent(
        self, limit: int, *, older_than: float, skip: int = 0
    ) -> list[tuple[str, Sequence[bytes]]]:
        return []

    def settled_by(self, uuids: Sequence[str]) -> list[str]:
        return [""] * len(uuids)

    def get_states(self, uuids: Sequence[str]) -> dict[str, TaskState]:
        raise self._unsupported("states")

    def get_group(self, group_uuid: str) -> GroupMeta | None:
        raise self._unsupported("groups")

    def ready_groups(self, limit: int) -> list[ReadyGroup]:
        return []

    def find(self, prefix: str, limit: int = 2) -> list[str]:
        return []

    def purge_state(self, task_uuid: str) -> None:
        pass  # there is none

    def purge_group_meta(self, group_uuid: str) -> None:
        pass  # there is none

    def listener(self) -> Listener:
        return _Deaf()

    def _unlisted(self) -> Unsupported:
        return self._unsupported("states")

    @staticmethod
    def _unsupported(what: str) -> Unsupported:
        return Unsupported(
            f"the null backend keeps no {what} (name a result backend: Server(result_backend=…))"
        )


class _Deaf(Listener):
    """Listener that returns at once: get_states then tells the waiter that nothing is kept."""

    def watch(self, uuids: Iterable[str]) -> None:
        pass

    def unwatch(self, uuids: Iterable[str]) -> None:
        pass

    def wait(self, timeout: float) -> None:
        pass

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass
