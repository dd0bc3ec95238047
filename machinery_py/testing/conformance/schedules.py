"""Promises of every store about the records of schedules.

One writer succeeds, in one step with the messages.

class TestMyStore(ScheduleConformance):
    @pytest.fixture
    def open_store(self, clock: ManualClock) -> OpenStore:
        return lambda: RowsStore(RowsBroker(MyRows()), RowsBackend(MyRows()))
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from machinery_py.backends.base import Rider, outbox_of
from machinery_py.errors import StateNotFound, Unsupported
from machinery_py.stores.base import Session, Store, Submission
from machinery_py.tasks.states import GroupMeta, State
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.fencing import (
    OpenStore,
    StoreCase,
    drain,
    message_of,
    state_of,
    uuid_of,
)
from machinery_py.testing.waiting import together

__all__ = ["OpenStore", "ScheduleConformance"]


def amend(
    store: Store,
    name: str,
    expected: bytes | None,
    body: bytes | None,
    *uuids: str,
    groups: tuple[GroupMeta, ...] = (),
) -> bool:
    return store.submit(
        Submission(
            token=f"tick {name} {uuids[0]}" if uuids else "",
            messages=[message_of(uuid) for uuid in uuids],
            states=[state_of(uuid) for uuid in uuids],
            groups=groups,
            riders=[Rider(name=name, expected=expected, body=body)],
        )
    )


def bodies(store: Store) -> dict[str, bytes]:
    found = store.backend.records().bodies
    assert found is not None
    return dict(found)


def where_kept(test: Callable[..., None]) -> Callable[..., None]:
    """Run the test on a store with records; on another, check that it refuses and does nothing."""

    @functools.wraps(test)
    def tried(self: StoreCase, **fixtures: Any) -> None:
        store: Store = fixtures["store"] if "store" in fixtures else fixtures["open_store"]()
        if store.backend.features.schedules:
            test(self, **fixtures)
            return
        with pytest.raises(Unsupported, match="keeps no schedules"):
            store.backend.records()
        for body in (b"1", None):
            with pytest.raises(Unsupported, match="keeps no schedules"):
                amend(
                    store,
                    "a",
                    None,
                    body,
                    "t",
                    groups=(GroupMeta(group_uuid="g", task_uuids=("t",)),),
                )
        assert drain(store, "q") == []
        assert store.backend.get_states(["t"]) == {}
        assert store.backend.get_group("g") is None

    return tried


class ScheduleConformance(StoreCase):
    """Tests of the promises of Store.submit, Backend.amend and Backend.records."""

    @where_kept
    def test_new_store_has_no_records(self, store: Store, clock: ManualClock) -> None:
        records = store.backend.records()
        assert (records.bodies, records.now) == ({}, clock.now())

    @where_kept
    def test_record_is_made_changed_and_removed(self, store: Store) -> None:
        assert amend(store, "a", None, b"1")
        assert amend(store, "b", None, b"x")
        assert amend(store, "a", b"1", b"2")
        assert bodies(store) == {"a": b"2", "b": b"x"}

        assert amend(store, "a", b"2", None)
        assert bodies(store) == {"b": b"x"}
        assert amend(store, "a", None, b"3")
        assert bodies(store) == {"a": b"3", "b": b"x"}

    @where_kept
    def test_amend_with_another_expected_value_writes_nothing(
        self, store: Store, session: Session
    ) -> None:
        amend(store, "a", None, b"1")

        for expected, name in ((None, "a"), (b"0", "a"), (b"", "a"), (b"1", "b")):
            assert not amend(
                store,
                name,
                expected,
                b"2",
                "t",
                groups=(GroupMeta(group_uuid="g", task_uuids=("t",)),),
            )
        assert not amend(store, "b", b"1", None)

        assert bodies(store) == {"a": b"1"}
        assert session.receive(9, 0) == []
        assert store.backend.get_group("g") is None
        with pytest.raises(StateNotFound):
            store.backend.get_state("t")

    @where_kept
    def test_messages_of_a_record_come_with_states_and_groups(
        self, store: Store, session: Session
    ) -> None:
        assert amend(
            store,
            "a",
            None,
            b"1",
            "t",
            "u",
            groups=(GroupMeta(group_uuid="g", task_uuids=("t", "u")),),
        )

        assert [uuid_of(delivery) for delivery in session.receive(9, 0)] == ["t", "u"]
        assert [store.backend.get_state(uuid).state for uuid in "tu"] == [State.PENDING] * 2
        group = store.backend.get_group("g")
        assert group is not None
        assert list(group.task_uuids) == ["t", "u"]
        assert outbox_of(store.backend).unsent(9, older_than=0.0) == []

    @where_kept
    def test_amend_repeated_after_a_lost_reply_sends_once(self, store: Store) -> None:
        amend(store, "a", None, b"1")
        for _ in range(3):
            amend(store, "a", b"1", b"2", "t")

        assert bodies(store) == {"a": b"2"}
        assert drain(store, "q") == ["t"]

    @where_kept
    def test_one_of_many_amends_of_one_value_sends(self, open_store: OpenStore) -> None:
        stores = [open_store() for _ in range(4)]
        amend(stores[0], "a", None, b"0")

        def send(tick: int, index: int) -> bool:
            old, new = b"%d" % tick, b"%d" % (tick + 1)
            return amend(stores[index % 4], "a", old, new, f"{tick}-{index}")

        for tick in range(5):
            won = together(16, functools.partial(send, tick))
            assert sum(won) == 1

        sent = drain(stores[0], "q")
        assert [uuid.partition("-")[0] for uuid in sent] == list("01234")
        for store in stores:
            store.close()

    @where_kept
    def test_version_changes_with_every_amend(self, store: Store) -> None:
        versions = [store.backend.records().version]
        for expected, body in (
            (None, b"1"),
            (b"1", b"2"),
            (b"2", b"1"),
            (b"1", None),
            (None, b"1"),
        ):
            assert amend(store, "a", expected, body)
            records = store.backend.records(versions[-1])
            assert records.bodies == ({} if body is None else {"a": body})
            versions.append(records.version)
            assert store.backend.records(records.version).bodies is None
        assert len(set(versions)) == len(versions)

        assert not amend(store, "a", b"0", b"9")
        assert store.backend.records(versions[-1]).bodies is None

    @where_kept
    def test_second_handle_reads_the_records(self, open_store: OpenStore) -> None:
        one, two = open_store(), open_store()
        amend(one, "a", None, b"1")
        assert bodies(two) == {"a": b"1"}
        assert amend(two, "a", b"1", b"2")
        assert not amend(one, "a", b"1", b"3")
        assert bodies(one) == {"a": b"2"}
        one.close()
        two.close()

    @where_kept
    def test_record_takes_any_name_and_any_bytes(self, store: Store) -> None:
        kept = {"": b"\x00\xff", "日本": b"{}", "a b:{c}'; --": b"x" * 100_000, "n" * 500: b"\n"}
        for name, body in kept.items():
            assert amend(store, name, None, body)
        assert bodies(store) == kept
        for name, body in kept.items():
            assert amend(store, name, body, None)
        assert bodies(store) == {}

    @where_kept
    def test_records_outlive_results(self, store: Store, clock: ManualClock) -> None:
        amend(store, "a", None, b"1", "t")
        drain(store, "q")
        clock.advance(days=40)
        store.tend()
        assert bodies(store) == {"a": b"1"}
