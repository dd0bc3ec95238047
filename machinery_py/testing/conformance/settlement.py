"""Promises of every store about submit, receive and settle.

No task is lost, and none is completed twice.

    class TestMyStore(SettlementConformance):
        @pytest.fixture
        def open_store(self, clock: ManualClock) -> OpenStore:
            return lambda: RowsStore(RowsBroker(MyRows()), RowsBackend(MyRows()))

Tests of dying sessions are in fencing.py.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter

import msgspec
import pytest

from machinery_py.backends.base import ALREADY, FENCED, SETTLED, Verdict
from machinery_py.brokers.base import Fate, Message
from machinery_py.brokers.queue_limits import QueueLimit
from machinery_py.errors import QueueFull
from machinery_py.stores.base import Firing, Mark, Session, Settlement, Store, Submission
from machinery_py.tasks.states import Arrival, GroupMeta, State
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.bounds import BoundsConformance
from machinery_py.testing.conformance.fencing import (
    FencingConformance,
    OpenStore,
    arrival,
    drain,
    message_of,
    settlement,
    state_of,
    submit,
    uuid_of,
)
from machinery_py.testing.waiting import HANG, together

__all__ = ["OpenStore", "SettlementConformance"]


class SettlementConformance(FencingConformance, BoundsConformance):
    """Tests of every promise in stores/base.py."""

    def test_state_and_message_are_submitted_together(self, store: Store, session: Session) -> None:
        submit(store, "a", "b", groups=[GroupMeta(group_uuid="g", task_uuids=("a", "b"))])

        assert [store.backend.get_state(uuid).state for uuid in "ab"] == [State.PENDING] * 2
        group = store.backend.get_group("g")
        assert group is not None
        assert list(group.task_uuids) == ["a", "b"]
        assert [uuid_of(delivery) for delivery in session.receive(9, 0)] == ["a", "b"]

    def test_repeated_submission_is_carried_out_once(self, store: Store, session: Session) -> None:
        submit(store, "a", token="t")
        (delivery,) = session.receive(9, 0)
        session.settle([], [Mark(delivery=delivery, state=state_of("a", State.STARTED))])

        submit(store, "a", token="t")
        together(4, lambda _: submit(store, "b", token="u"))

        assert store.backend.get_state("a").state is State.STARTED
        assert [uuid_of(delivery) for delivery in session.receive(9, 0)] == ["b"]

    def test_repeat_of_a_submission_finds_the_queue_full_of_itself(self, store: Store) -> None:
        limited = Submission(
            token="t",
            messages=[message_of("a"), message_of("b")],
            states=[state_of("a"), state_of("b")],
            limits=[QueueLimit("q", 3, 2)],
        )
        store.submit(limited)

        store.submit(limited)
        with pytest.raises(QueueFull):
            store.submit(msgspec.structs.replace(limited, token="another"))

        assert drain(store, "q") == ["a", "b"]

    def test_submission_with_an_eta_waits_for_it(
        self, store: Store, session: Session, clock: ManualClock
    ) -> None:
        eta = clock.now() + dt.timedelta(seconds=5)
        store.submit(
            Submission(token="", messages=[message_of("a", eta=eta)], states=[state_of("a")])
        )
        assert session.receive(9, 0) == []
        clock.advance(5.5)
        store.tend()
        assert [uuid_of(delivery) for delivery in session.receive(9, HANG)] == ["a"]

    def test_replay_starts_a_finished_task_anew(self, store: Store, session: Session) -> None:
        submit(store, "a")
        (delivery,) = session.receive(1, 0)
        old = settlement(delivery, State.FAILURE, callbacks=["c"])
        session.settle([old])

        replay = Submission(
            token="r", messages=[message_of("a", run=1)], states=[state_of("a", run=1)], replay=True
        )
        store.submit(replay)

        assert (store.backend.get_state("a").state, store.backend.get_state("a").run) == (
            State.PENDING,
            1,
        )
        (again,) = session.receive(1, 0)
        assert session.settle([old]) != [SETTLED]
        assert session.settle([settlement(again, run=1)]) == [SETTLED]
        assert store.backend.get_state("a").state is State.SUCCESS

    def test_settlement_commits_states_messages_and_arrivals(
        self, store: Store, session: Session
    ) -> None:
        submit(store, "a")
        (delivery,) = session.receive(1, 0)
        end = settlement(
            delivery,
            callbacks=["c1", "c2"],
            arrivals=[arrival(delivery, 1)],
            groups=[GroupMeta(group_uuid="h", task_uuids=("c1", "c2"))],
        )

        assert session.settle([end]) == [SETTLED]

        assert store.backend.get_state("a").state is State.SUCCESS
        assert [store.backend.get_state(uuid).state for uuid in ("c1", "c2")] == [State.PENDING] * 2
        assert store.backend.get_group("h") is not None
        assert [group.group_uuid for group in store.ready_groups()] == ["g"]
        assert drain(store, "c") == ["c1", "c2"]
        session.close()
        assert drain(store, "q") == []

    def test_repeated_settlement_is_reported_as_already_done(
        self, store: Store, session: Session
    ) -> None:
        submit(store, "a")
        (delivery,) = session.receive(1, 0)
        end = settlement(delivery, callbacks=["c1"], arrivals=[arrival(delivery, 1)])
        assert session.settle([end]) == [SETTLED]
        assert store.fire(Firing(group_uuid="g")) is True

        assert session.settle([end]) == [ALREADY]
        assert session.settle(
            [end], [Mark(delivery=delivery, state=state_of("a", State.STARTED))]
        ) == [ALREADY]

        assert drain(store, "c") == ["c1"]
        assert store.ready_groups() == []
        assert store.backend.get_state("a").state is State.SUCCESS

    @pytest.mark.parametrize("fate", [Fate.BACK, Fate.LATER, Fate.DEAD])
    def test_repeated_return_doubles_no_message(
        self, store: Store, session: Session, fate: Fate
    ) -> None:
        submit(store, "a")
        (delivery,) = session.receive(1, 0)
        end = Settlement(delivery=delivery, uuid="a", fate=fate)
        assert session.settle([end]) == [SETTLED]
        assert session.settle([end]) != [SETTLED]

        again = session.receive(9, 0)
        assert session.settle([end]) != [SETTLED]

        assert len(again) + len(store.broker.dead_letters(limit=9)) == 1
        assert session.settle([settlement(one) for one in again]) == [SETTLED] * len(again)

    def test_second_message_of_a_finished_task_is_consumed(
        self, store: Store, session: Session
    ) -> None:
        submit(store, "a", token="1")
        (first,) = session.receive(1, 0)
        assert session.settle(
            [settlement(first, callbacks=["c"], arrivals=[arrival(first, 2)])]
        ) == [SETTLED]
        submit(store, "a", token="2")

        second = session.receive(9, 0)  # a store may finish it without a worker
        late = [
            settlement(one, State.FAILURE, callbacks=["no"], arrivals=[arrival(one, 2)])
            for one in second
        ]
        assert session.settle(late) == [FENCED] * len(second)

        session.close()
        assert store.backend.get_state("a").state is State.SUCCESS
        assert (drain(store, "q"), drain(store, "c"), store.ready_groups()) == ([], ["c"], [])

    def test_retry_is_followed_by_the_next_run(
        self, store: Store, session: Session, clock: ManualClock
    ) -> None:
        submit(store, "a")
        (first,) = session.receive(1, 0)
        retry = Settlement(
            delivery=first,
            uuid="a",
            states=[state_of("a", State.RETRY, error="boom")],
            send=[message_of("a", run=1, eta=clock.now() + dt.timedelta(seconds=5))],
        )
        assert session.settle([retry]) == [SETTLED]
        assert session.settle([retry]) == [ALREADY]
        assert store.backend.get_state("a").state is State.RETRY
        assert session.receive(9, 0) == []
        clock.advance(5.5)
        session.beat()
        store.tend()

        (second,) = session.receive(9, 0)
        session.settle([], [Mark(delivery=second, state=state_of("a", State.STARTED, run=1))])
        assert (store.backend.get_state("a").state, store.backend.get_state("a").run) == (
            State.STARTED,
            1,
        )
        assert (second.strikes, second.count) == (0, 1)
        assert session.settle([retry]) != [SETTLED]
        assert session.settle([settlement(second, run=1)]) == [SETTLED]
        assert session.receive(9, 0) == []

    def test_marks_store_received_started_and_progress(
        self, store: Store, session: Session
    ) -> None:
        submit(store, "a", "b")
        a, b = session.receive(2, 0)
        assert session.settle([], [Mark(delivery=a, state=state_of("a", State.RECEIVED))]) == []
        assert store.backend.get_state("a").state is State.RECEIVED
        started = [
            Mark(delivery=one, state=state_of(uuid_of(one), State.STARTED)) for one in (a, b)
        ]

        assert session.settle([settlement(b)], started) == [SETTLED]

        progress = Mark(delivery=a, state=state_of("a", State.STARTED, progress=(1.0, 2.0)))
        session.settle([], [progress])
        kept = store.backend.get_state("a")
        assert (kept.state, kept.progress) == (State.STARTED, (1.0, 2.0))
        assert store.backend.get_state("b").state is State.SUCCESS

    def test_batch_returns_a_verdict_per_item(
        self, store: Store, session: Session, clock: ManualClock
    ) -> None:
        submit(store, "lost")
        (lost,) = session.receive(1, 0)
        heir, _ = self.take_over(store, session, clock)
        session.beat()
        submit(store, "a", "b", "c")
        a, b, c = session.receive(9, 0)
        assert session.settle([settlement(b, callbacks=["cb"])]) == [SETTLED]

        verdicts = session.settle(
            [settlement(one, callbacks=[f"c{uuid_of(one)}"]) for one in (a, lost, b, c)]
        )

        assert verdicts == [SETTLED, FENCED, ALREADY, SETTLED]
        assert sorted(drain(store, "c")) == ["ca", "cb", "cc"]
        assert session.settle([]) == []
        heir.close()

    def test_later_and_back_return_the_message(
        self, store: Store, session: Session, clock: ManualClock
    ) -> None:
        submit(store, "a", "b", "c")
        a, b = session.receive(2, 0)
        eta = clock.now() + dt.timedelta(seconds=5)

        given = [
            Settlement(delivery=a, fate=Fate.LATER, eta=eta),
            Settlement(delivery=b, fate=Fate.BACK),
        ]
        assert session.settle(given) == [SETTLED, SETTLED]

        assert [uuid_of(one) for one in session.receive(9, 0)] == ["b", "c"]
        clock.advance(5.5)
        session.beat()
        store.tend()
        assert [(uuid_of(one), one.parks) for one in session.receive(9, 0)] == [("a", 1)]

    def test_dead_letter_and_failure_are_committed_together(
        self, store: Store, session: Session
    ) -> None:
        submit(store, "a")
        store.broker.put([Message(uuid="", name="", queue="q", body=b"\xffno signature")], token="")
        a = session.receive(1, 0)
        end = settlement(
            a[0], State.FAILURE, callbacks=["e"], fate=Fate.DEAD, reason="poison", error="boom"
        )
        assert session.settle([end]) == [SETTLED]
        assert session.settle([end]) == [ALREADY]
        bad = session.receive(1, 0)  # a store may bury it without a worker
        session.settle(
            [Settlement(delivery=one, fate=Fate.DEAD, reason="undecodable") for one in bad]
        )

        letters = {letter.reason: letter for letter in store.broker.dead_letters(limit=9)}

        assert set(letters) == {"poison", "undecodable"}
        assert (letters["poison"].uuid, letters["poison"].body) == ("a", a[0].body)
        assert (letters["poison"].name, letters["poison"].error) == ("add", "boom")
        assert letters["undecodable"].body == b"\xffno signature"
        assert store.backend.get_state("a").state is State.FAILURE
        assert (drain(store, "q"), drain(store, "c")) == ([], ["e"])

    def test_chord_sends_its_callback_once(self, store: Store, session: Session) -> None:
        submit(store, "a", token="1", groups=[GroupMeta(group_uuid="g", task_uuids=("a", "b"))])
        submit(store, "a", token="2")
        submit(store, "b")
        for _ in range(3):
            assert store.ready_groups() == []
            for one in session.receive(1, 0):
                session.settle([settlement(one, arrivals=[arrival(one, 2)])])
        assert [(group.group_uuid, group.failed_member) for group in store.ready_groups()] == [
            ("g", "")
        ]

        def fire(index: int) -> bool:
            callback = f"callback{index}"
            states, send = [state_of(callback)], [message_of(callback, queue="c")]
            return store.fire(Firing(group_uuid="g", states=states, send=send))

        fired = together(16, fire)

        winner = f"callback{fired.index(True)}"
        assert fired.count(True) == 1
        assert drain(store, "c") == [winner]
        assert set(store.backend.get_states([f"callback{index}" for index in range(16)])) == {
            winner
        }
        assert store.ready_groups() == []

    def test_failed_member_fails_its_chord_at_once(self, store: Store, session: Session) -> None:
        submit(store, "a", "b", "c")
        a, b, c = session.receive(3, 0)
        session.settle([settlement(b, State.FAILURE, arrivals=[arrival(b, 3, ok=False)])])
        (broken,) = store.ready_groups()
        assert (broken.group_uuid, broken.failed_member, broken.callback) == ("g", "b", b"callback")

        failure = state_of("callback", State.FAILURE, error="b failed")
        assert store.fire(Firing(group_uuid="g", states=[failure])) is True
        assert (
            session.settle([settlement(one, arrivals=[arrival(one, 3)]) for one in (a, c)])
            == [SETTLED] * 2
        )

        assert store.ready_groups() == []
        assert store.backend.get_state("callback").error == "b failed"
        assert drain(store, "c") == []

    def test_task_without_a_delivery_is_ended_once(
        self, store: Store, open_store: OpenStore
    ) -> None:
        submit(store, "a", "b")
        session = store.open_session(["q"], worker="w")
        a, b = session.receive(2, 0)
        assert session.settle([settlement(b)]) == [SETTLED]

        def end(uuid: str, number: int) -> bool:
            states = [state_of(uuid, State.FAILURE, error="revoked"), state_of(f"c{number}")]
            arrivals = [
                Arrival(group_uuid="g", task_uuid=uuid, total=2, ok=False, callback=b"callback")
            ]
            send = [message_of(f"c{number}", queue="c")]
            return store.fire(Firing(task_uuid=uuid, states=states, send=send, arrivals=arrivals))

        ended = together(4, lambda number: end("a", number))
        assert ended.count(True) == 1
        assert not end("b", 9)
        assert drain(store, "c") == [f"c{ended.index(True)}"]
        assert (store.backend.get_state("a").error, store.backend.get_state("b").state) == (
            "revoked",
            State.SUCCESS,
        )
        assert [(group.group_uuid, group.failed_member) for group in store.ready_groups()] == [
            ("g", "a")
        ]

        # The worker that has just begun it is too late.
        assert session.settle([settlement(a, callbacks=["never"])]) == [FENCED]
        assert drain(store, "c") == [f"c{ended.index(True)}"]
        session.close()
        assert store.backend.get_state("a").error == "revoked"
        another = open_store().open_session(["q"], worker="w")
        assert another.receive(9, 0) == []
        another.close()

    def test_many_sessions_settle_each_task_once(self, store: Store, open_store: OpenStore) -> None:
        uuids = [f"task_{number}" for number in range(120)]
        submit(store, *uuids)

        def work(_: int) -> list[Verdict]:
            handle = open_store()
            session = handle.open_session(["q"], worker="w")
            verdicts: list[Verdict] = []
            while found := session.receive(7, 0):
                verdicts += session.settle(
                    [
                        settlement(
                            one, callbacks=[f"c_{uuid_of(one)}"], arrivals=[arrival(one, 120)]
                        )
                        for one in found
                    ]
                )
            session.close()
            handle.close()
            return verdicts

        verdicts = [verdict for found in together(4, work, HANG * 2) for verdict in found]

        assert verdicts == [SETTLED] * 120
        assert Counter(drain(store, "c")) == Counter(f"c_{uuid}" for uuid in uuids)
        assert len(store.ready_groups()) == 1
        assert {state.state for state in store.backend.get_states(uuids).values()} == {
            State.SUCCESS
        }

    def test_one_of_many_threads_settles(self, store: Store, session: Session) -> None:
        submit(store, "a")
        (delivery,) = session.receive(1, 0)
        end = settlement(delivery, callbacks=["c"], arrivals=[arrival(delivery, 1)])

        verdicts = [verdict for (verdict,) in together(8, lambda _: session.settle([end]))]

        assert (verdicts.count(SETTLED), verdicts.count(ALREADY)) == (1, 7)
        assert drain(store, "c") == ["c"]

    def test_closing_a_session_returns_its_deliveries(self, store: Store, session: Session) -> None:
        submit(store, "a", "b")
        (a,) = session.receive(1, 0)
        session.close()
        session.close()

        heir = store.open_session(["q"], worker="heir")
        found = heir.receive(9, 0)
        assert [(uuid_of(one), one.strikes) for one in found] == [("a", 0), ("b", 0)]
        assert session.settle([settlement(a)]) == [FENCED]
        assert heir.settle([settlement(one) for one in found]) == [SETTLED, SETTLED]

    def test_wake_ends_the_wait_of_a_session(self, session: Session) -> None:
        session.consumer.wake()
        assert session.receive(1, HANG * 2) == []

    def test_tend_returns_the_time_of_its_next_call(self, store: Store) -> None:
        assert 0.0 <= store.tend() <= 3600.0

    def test_store_can_be_closed_twice(self, open_store: OpenStore) -> None:
        store = open_store()
        submit(store, "a")
        store.close()
        store.close()
