"""The collection `tasks`: reading its documents (documents.py), and writing over what was read.

A write names the version (and, because of Go, the state) that it has seen, so of many writers of
one document each knows whether it was the one. After a lost reply a writer finds its own stamp.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence

from pymongo import UpdateOne

from machinery_py.backends.mongodb.documents import (
    TaskDocument,
    fields_of,
    kept_of,
    new_document,
    refusal_of,
)
from machinery_py.backends.mongodb.groups import CHORD_LIFE
from machinery_py.bounds import in_steps
from machinery_py.connections.mongodb.client import (
    Document,
    DriverUser,
    MongoDriver,
    Store,
    find_by_id,
    insert_new,
    step,
)
from machinery_py.errors import BackendUnavailable, NameRefused
from machinery_py.names import is_made
from machinery_py.tasks.states import State, TaskState, advance
from machinery_py.texts import get_logger

logger = get_logger(__name__)

ROUNDS = 200  # tries of a write that others are faster at

_WITHOUT_RESULTS = {"results": 0, "outbox": 0}

#: Only tasks in one of these states, or in a later run, may have ended a run.
_ENDED = frozenset({State.SUCCESS.value, State.FAILURE.value, State.RETRY.value})

#: UUID → version and state of the document that is written over.
Before = dict[str, tuple[int, str | None]]


class MongoTasks(DriverUser):
    """The collection `tasks` of the driver's database.

    Args:
        expire_in: seconds that a finished task is kept.
    """

    def __init__(self, driver: MongoDriver, *, expire_in: float) -> None:
        super().__init__(driver)
        self._expire_in = expire_in

    def until(self, state: TaskState | None = None) -> int:
        """Return the moment (µs) until which is kept what is finished now, or this state."""
        life = self._expire_in if state is None else state.life(self._expire_in)
        return self.driver.now() + int(life * 1e6)

    def too_many_rivals(self, doing: str = "writing states") -> BackendUnavailable:
        return BackendUnavailable(
            f"MongoDB at {self.driver.place}: {doing}: others were faster {ROUNDS} times"
        )

    def load(self, uuids: Iterable[str]) -> dict[str, TaskDocument]:
        """Read the documents that there are, to write over them.

        Raises:
            NameRefused: one of them is no state of a task.
        """
        wanted = list(dict.fromkeys(uuids))
        return self._load(wanted) if wanted else {}

    @step("reading states")
    def _load(self, store: Store, wanted: Sequence[str]) -> dict[str, TaskDocument]:
        now = self.driver.now()
        found = find_by_id(store.tasks, wanted, _WITHOUT_RESULTS)
        return {one["_id"]: kept_of(one, now) for one in found}

    def refusals(self, uuids: Iterable[str]) -> dict[str, NameRefused]:
        """Return the error for each UUID under which something else than a state is stored.

        UUIDs that we or Go made are not looked up.
        """
        chosen = [uuid for uuid in dict.fromkeys(uuids) if not is_made(uuid)]
        return self._refusals(chosen) if chosen else {}

    @step("reading states")
    def _refusals(self, store: Store, wanted: Sequence[str]) -> dict[str, NameRefused]:
        found = find_by_id(store.tasks, wanted, _WITHOUT_RESULTS)
        return {one["_id"]: error for one in found if (error := refusal_of(one)) is not None}

    def load_ended(self, uuids: Iterable[str]) -> dict[str, TaskDocument]:
        """As `load`, of those tasks of which a run may have ended."""
        wanted = list(dict.fromkeys(uuids))
        return self.load(self._ended(wanted)) if wanted else {}

    @step("reading states")
    def _ended(self, store: Store, wanted: Sequence[str]) -> list[str]:
        # By `_id` alone, so that no server looks at other tasks.
        found = find_by_id(store.tasks, wanted, {"state": 1, "run": 1})
        return [one["_id"] for one in found if one.get("state") in _ENDED or one.get("run")]

    def save(
        self,
        rows: dict[str, TaskDocument],
        before: Before,
        more: dict[str, Document] | None = None,
        held: Iterable[str] = (),
    ) -> set[str]:
        """Write changed rows over what was read; return those that somebody else has changed.

        Args:
            more: fields that are set besides.
            held: members of chords, whose results are kept until their chord was settled.
        """
        changed = {uuid: row for uuid, row in rows.items() if row.changed}
        if not changed:
            return set()
        more, held = more or {}, set(held)
        place, until = self.driver.next_place(len(changed)), self.until()
        moment = self.driver.moment()
        stamp = secrets.token_hex(8)
        fresh: list[Document] = []
        writes: list[UpdateOne] = []
        for now, (uuid, row) in enumerate(changed.items(), place):
            is_plain = row.state is None or row.state.keep_for is None
            expires_at = until if is_plain else self.until(row.state)
            if uuid in held:
                expires_at = max(expires_at, until + CHORD_LIFE)
            extra = {**more.get(uuid, {}), "stamp": stamp}
            if uuid not in before:
                document = new_document(uuid, row, now=now, expires_at=expires_at, moment=moment)
                fresh.append({**document, **extra})
                continue
            version, word = before[uuid]
            seen = {"version": version} if version else {"version": {"$exists": False}}
            fields = fields_of(row, version=version + 1, now=now, expires_at=expires_at)
            writes.append(
                UpdateOne({"_id": uuid, "state": word, **seen}, {"$set": {**fields, **extra}})
            )
        if self._write(fresh, writes):
            return set()
        # Somebody was faster, or this was the repeat after a lost reply: our stamp tells.
        return changed.keys() - self._stamped(list(changed), stamp)

    @step("writing states")
    def _write(self, store: Store, fresh: list[Document], writes: list[UpdateOne]) -> bool:
        """Return whether all was as it had been read."""
        is_whole = all(insert_new(store.tasks, fresh))
        for some in in_steps(writes):
            is_whole &= store.tasks.bulk_write(some, ordered=False).matched_count == len(some)
        return is_whole

    @step("reading states")
    def _stamped(self, store: Store, uuids: list[str], stamp: str) -> set[str]:
        query = {"_id": {"$in": uuids}, "stamp": stamp}
        return {one["_id"] for one in store.tasks.find(query, {"_id": 1})}

    def advance(
        self, states: Sequence[TaskState], *, force: bool = False, again: bool = False
    ) -> None:
        """Write states through `advance`; with `force` as they are, `again` only over earlier runs.

        One whose document is somebody else's is left out: its message is sent all the same.
        """
        left = list(states)
        for _ in range(ROUNDS):
            refused = self.refusals(state.task_uuid for state in left)
            for error in refused.values():
                logger.error("what follows a task is left out: %s", error)
            left = [state for state in left if state.task_uuid not in refused]
            if not left:
                return
            rows = self.load(state.task_uuid for state in left)
            before = seen_of(rows)
            for state in left:
                row = rows.get(state.task_uuid) or TaskDocument()
                is_old = not again or row.state is None or row.state.run < state.run
                after = advance(row.state, state) if not force else state if is_old else None
                if after is not None:
                    row.state, row.changed = after, True
                    rows[state.task_uuid] = row
            lost = self.save(rows, before)
            left = [state for state in left if state.task_uuid in lost]
        raise self.too_many_rivals()


def seen_of(rows: dict[str, TaskDocument]) -> Before:
    """Return the version and word of each row, which `save` compares before it writes."""
    return {uuid: (row.version, row.word) for uuid, row in rows.items()}
