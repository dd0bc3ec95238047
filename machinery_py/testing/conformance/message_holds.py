"""Promises of holds: what ends them, and what their messages get by that."""

from __future__ import annotations

from machinery_py.rows.contract import (
    Committed,
    Gone,
    Write,
)
from machinery_py.rows.messages import (
    Claimed,
    Hold,
    MessageRows,
    MessageStep,
)
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.message_case import (
    BESIDE,
    LEASE,
    MessageCase,
    OpenMessageRows,
    bodies,
    carry_out,
    claim,
    put,
)
from machinery_py.testing.waiting import together


class HoldConformance(MessageCase):
    """Tests of holds that end, or are condemned."""

    def test_end_of_a_hold_gives_back_without_a_strike(self, rows: MessageRows, hold: Hold) -> None:
        put(rows, b"1")
        [claimed] = claim(hold, 1)
        hold.begin_run(claimed.receipt)
        hold.end()

        assert carry_out(rows, MessageStep(takes=(claimed.receipt,))) == Gone()
        assert claim(hold, 1) == []
        [again] = claim(rows.open_hold(b"two", lease=LEASE), 1)
        assert (again.receipt.count, again.strikes) == (2, 0)

    def test_dead_hold_is_condemned_in_steps(
        self, rows: MessageRows, hold: Hold, clock: ManualClock
    ) -> None:
        put(rows, b"1", b"2", b"3")
        found = claim(hold, 3)
        hold.begin_run(found[2].receipt)
        self.let_die(hold)
        rows.dead_holds()
        clock.advance(LEASE + 1.0)
        rows.dead_holds()
        clock.advance(LEASE)
        assert rows.dead_holds() == [hold.id]

        assert rows.condemn(hold.id, 2) == 2
        for one in found:
            assert carry_out(rows, MessageStep(takes=(one.receipt,))) == Gone()
            assert carry_out(rows, MessageStep(held=(one.receipt,))) == Gone()
        assert (hold.beat(), claim(hold, 1), rows.dead_holds()) == (False, [], [hold.id])
        assert rows.condemn(hold.id, 2) == 1
        assert rows.dead_holds() == []
        again = claim(rows.open_hold(b"two", lease=LEASE), 3)
        assert bodies(again) == [b"1", b"2", b"3"]
        assert [one.strikes for one in again] == [0, 0, 1]

    def test_looks_at_one_moment_condemn_no_hold(
        self, rows: MessageRows, hold: Hold, clock: ManualClock
    ) -> None:
        """The first worker after an outage looks before others can beat."""
        put(rows, b"1")
        [claimed] = claim(hold, 1)
        self.hide(rows, hold)
        rows.dead_holds()
        clock.advance(LEASE + 1.0)
        for _ in range(3):
            assert rows.dead_holds() == []
            assert rows.condemn(hold.id, 9) is None
        clock.advance(LEASE / 2)
        assert rows.dead_holds() == []

        assert hold.beat()
        assert isinstance(carry_out(rows, MessageStep(takes=(claimed.receipt,))), Committed)

    def test_dead_hold_is_found_although_the_clock_was_set_back(
        self, rows: MessageRows, hold: Hold, clock: ManualClock
    ) -> None:
        """The last beat is in the future then."""
        other = rows.open_hold(b"two", lease=LEASE)
        self.hide(rows, hold)
        self.hide(rows, other)
        clock.set_back(3600.0)
        for _ in range(6):
            rows.dead_holds()
            clock.advance(LEASE / 2)
            assert other.beat()

        assert rows.dead_holds() == [hold.id]
        assert rows.condemn(hold.id, 9) == 0

    def test_hold_that_beats_meanwhile_is_not_condemned(
        self, rows: MessageRows, hold: Hold, clock: ManualClock
    ) -> None:
        put(rows, b"1")
        [claimed] = claim(hold, 1)
        self.hide(rows, hold)
        rows.dead_holds()
        clock.advance(LEASE + 1.0)
        rows.dead_holds()
        clock.advance(LEASE)
        assert rows.dead_holds() == [hold.id]
        assert hold.beat()

        assert rows.condemn(hold.id, 9) is None
        assert isinstance(carry_out(rows, MessageStep(takes=(claimed.receipt,))), Committed)

    def test_one_settles_a_message_or_its_hold_is_condemned(
        self, open_rows: OpenMessageRows, clock: ManualClock
    ) -> None:
        handles = [open_rows() for _ in range(5)]
        for _ in range(20):
            hold = handles[0].open_hold(b"", lease=LEASE)
            put(handles[0], b"1")
            [claimed] = claim(hold, 1)
            self.let_die(hold)
            clock.advance(LEASE + 1.0)
            handles[4].dead_holds()
            clock.advance(LEASE)
            handles[4].dead_holds()

            def work(index: int, hold: Hold = hold, claimed: Claimed = claimed) -> object:
                if index == 4:
                    return handles[4].condemn(hold.id, 9)
                if index == 3:
                    step = MessageStep(
                        held=(claimed.receipt,), write={BESIDE: Write(body=claimed.body)}
                    )
                else:
                    step = MessageStep(takes=(claimed.receipt,))
                return carry_out(handles[index], step)

            done = together(5, work)
            handles[4].reap()  # what a step had when it was condemned
            settled = sum(isinstance(one, Committed) for one in done[:3])
            back = claim(handles[0].open_hold(b"", lease=LEASE), 9)
            assert settled + len(back) == 1
            for one in back:
                carry_out(handles[0], MessageStep(takes=(one.receipt,)))
