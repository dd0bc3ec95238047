"""Promises of claims: order, time, queues, bounds, lost replies; and of what listings show."""

from __future__ import annotations

import random

import pytest

from machinery_py.clock import micros
from machinery_py.rows.contract import (
    Committed,
    Gone,
    Key,
    Write,
)
from machinery_py.rows.messages import (
    CLOSED,
    REVOKED,
    Claimed,
    ClaimReceipt,
    Hold,
    MessageRows,
    MessageStep,
    Place,
    Push,
    waiting_at,
)
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.message_case import (
    LEASE,
    SECOND,
    MessageCase,
    OpenMessageRows,
    back,
    bodies,
    carry_out,
    claim,
    put,
)
from machinery_py.testing.waiting import together


class MessageClaimConformance(MessageCase):
    """Tests of Hold.claim, and of the messages that wait for it."""

    def test_message_is_claimed_once(self, rows: MessageRows, hold: Hold) -> None:
        put(rows, b"1", b"2")
        other = rows.open_hold(b"two", lease=LEASE)

        assert bodies(claim(hold, 1)) == [b"1"]
        assert bodies(claim(other, 5)) == [b"2"]
        assert claim(hold, 5) == []

    def test_receipt_of_an_earlier_claim_takes_nothing(self, rows: MessageRows, hold: Hold) -> None:
        put(rows, b"1")
        [first] = claim(hold, 1)
        carry_out(rows, MessageStep(takes=(first.receipt,), pushes=(back(first),)))
        [second] = claim(hold, 1)

        assert carry_out(rows, MessageStep(takes=(first.receipt,))) == Gone()
        assert second.fence > first.fence
        assert hold.has([first.receipt, second.receipt]) == [False, True]

    def test_message_that_goes_back_keeps_its_place(self, rows: MessageRows, hold: Hold) -> None:
        put(rows, b"1", b"2")
        [claimed] = claim(hold, 1)
        carry_out(rows, MessageStep(takes=(claimed.receipt,), pushes=(back(claimed),)))

        assert bodies(claim(hold, 5)) == [b"1", b"2"]

    def test_greater_priority_goes_first(self, rows: MessageRows, hold: Hold) -> None:
        put(rows, b"low")
        put(rows, b"high", priority=5)

        assert bodies(claim(hold, 5)) == [b"high", b"low"]

    def test_late_message_waits_until_it_is_due(
        self, rows: MessageRows, hold: Hold, clock: ManualClock
    ) -> None:
        due = micros(clock.now()) + 5 * SECOND
        put(rows, b"1", due=due)

        claims = hold.claim(["q"], 1)
        assert (claims.found, claims.next_due) == ([], due)
        assert rows.promote() == due
        assert [one.body for one in rows.messages(None)] == [b"1"]
        clock.advance(5.0)
        claims = hold.claim(["q"], 1)
        assert (bodies(claims.found), claims.next_due) == ([b"1"], None)

    def test_nothing_is_claimed_from_a_closed_queue(self, rows: MessageRows, hold: Hold) -> None:
        put(rows, b"1")
        carry_out(rows, MessageStep(write={Key(CLOSED, "q"): Write(body=b"")}))
        assert claim(hold, 1) == []

        carry_out(rows, MessageStep(write={Key(CLOSED, "q"): None}))
        assert bodies(claim(hold, 1)) == [b"1"]

    def test_claim_overlooks_no_revoked_task(
        self, open_rows: OpenMessageRows, rows: MessageRows, hold: Hold
    ) -> None:
        put(rows, b"1", b"2")
        hold.claim(["q"], 1)
        carry_out(open_rows(), MessageStep(write={Key(REVOKED, "task"): Write(body=b"")}))

        assert not hold.claim(["q"], 1).none_revoked
        assert not hold.claim(["q"], 1, number=2, lost=1).none_revoked

    def test_messages_are_listed_page_by_page(self, rows: MessageRows) -> None:
        put(rows, b"1", b"2", b"3")
        first, second = rows.messages("q", items=2)

        assert [first.body, second.body] == [b"1", b"2"]
        assert [one.body for one in rows.messages("q", after=second)] == [b"3"]
        assert len(rows.messages("q", size=1)) == 1

    def test_pages_of_messages_follow_each_other(
        self, rows: MessageRows, hold: Hold, clock: ManualClock
    ) -> None:
        due = micros(clock.now()) + SECOND
        put(rows, b"waits")
        [claimed] = claim(hold, 1)
        waited = Push(queue="q", id=claimed.receipt.id, due=due, place=Place.WAITED)
        carry_out(rows, MessageStep(takes=(claimed.receipt,), pushes=(waited,)))
        put(rows, b"late 1", b"late 2", due=due)
        put(rows, b"later", due=due + SECOND)

        def paged(queue: str | None) -> list[bytes]:
            found: list[bytes] = []
            last = None
            while page := rows.messages(queue, after=last, items=1):
                last = page[0]
                found.append(last.body)
            return found

        assert paged(None) == [b"waits", b"late 1", b"late 2", b"later"]
        clock.advance(1.0)
        put(rows, b"a", b"b", tenant="one")
        put(rows, b"c", b"d", tenant="two", priority=3)
        put(rows, b"e", b"f")
        listed = paged("q")
        assert listed == [one.body for one in rows.messages("q")]
        assert listed[:3] == [b"c", b"d", b"waits"]
        assert len(listed) == 9

    def test_ids_of_messages_rise(self, rows: MessageRows, hold: Hold) -> None:
        put(rows, b"1", b"2")
        first = [one.id for one in rows.messages("q")]
        for one in claim(hold, 2):
            carry_out(rows, MessageStep(takes=(one.receipt,)))
        newest = rows.newest_id()
        put(rows, b"3")
        [third] = rows.messages("q")

        assert first == sorted(first)
        assert first[-1] <= newest < third.id

    def test_counts_say_where_messages_are(
        self, rows: MessageRows, hold: Hold, clock: ManualClock
    ) -> None:
        put(rows, b"1", b"2")
        put(rows, b"3", due=micros(clock.now()) + SECOND)
        claim(hold, 1)
        count = rows.count_messages()["q"]

        assert (count.waiting, count.late, count.held) == (1, 1, 1)
        assert count.oldest_at == micros(clock.now())
        assert [one.holding for one in rows.holds()] == [1]

    def test_fences_grow_with_those_of_claims_and_rows(self, rows: MessageRows, hold: Hold) -> None:
        first = rows.fences(3)
        put(rows, b"1")
        [claimed] = claim(hold, 1)

        assert claimed.fence > first + 2
        assert rows.fences(1) > claimed.fence

    def test_late_message_is_taken_before_it_is_due(
        self, rows: MessageRows, hold: Hold, clock: ManualClock
    ) -> None:
        put(rows, b"1", due=micros(clock.now()) + SECOND)
        [late] = rows.messages(None)
        assert isinstance(carry_out(rows, MessageStep(takes=(waiting_at(late.id),))), Committed)
        clock.advance(2.0)

        assert hold.claim(["q"], 1).found == []
        assert rows.promote() is None

    def test_claim_ends_before_its_bodies_are_too_many_bytes(
        self, rows: MessageRows, hold: Hold
    ) -> None:
        put(rows, b"x" * 10, b"x" * 6, b"x" * 4, b"x")
        carry_out(rows, MessageStep(pushes=(Push(queue="other", body=b"y" * 20),)))

        def sizes() -> list[int]:
            return [len(one.body) for one in hold.claim(["q", "other"], 9, size=10).found]

        assert [sizes(), sizes(), sizes(), sizes()] == [[10], [6, 4], [1], [20]]

    def test_lost_claim_comes_again_with_the_next(self, rows: MessageRows, hold: Hold) -> None:
        put(rows, b"1", b"2", b"3")
        had = hold.claim(["q"], 1, number=1).found
        lost = hold.claim(["q"], 1, number=2).found
        again = hold.claim(["q"], 2, number=3, lost=2).found

        assert [one.receipt for one in again[:1]] == [one.receipt for one in lost]
        assert bodies(had + again) == [b"1", b"2", b"3"]
        assert hold.claim(["q"], 2, number=4, lost=4).found == []

    def test_claim_that_comes_after_it_was_named_lost_gives_nothing(
        self, rows: MessageRows, hold: Hold
    ) -> None:
        """A server may carry it out when its caller has given it up, and asked again."""
        assert hold.claim(["q"], 1, number=2, lost=1).found == []
        put(rows, b"1")

        assert hold.claim(["q"], 1, number=1).found == []
        assert bodies(hold.claim(["q"], 1, number=3).found) == [b"1"]

    @pytest.mark.parametrize("items", [1, 2, 3])
    def test_lost_claim_counts_to_what_the_next_may_have(
        self, rows: MessageRows, hold: Hold, items: int
    ) -> None:
        put(rows, *(b"%d" % number for number in range(5)))
        hold.claim(["q"], 2, number=1)
        again = hold.claim(["q"], items, number=2, lost=1).found

        assert bodies(again) == [b"0", b"1", b"2"][: max(2, items)]

    def test_nothing_is_claimed_once_the_queue_was_closed(self, open_rows: OpenMessageRows) -> None:
        handles = [open_rows() for _ in range(3)]
        holds = [one.open_hold(b"", lease=LEASE) for one in handles]
        for _ in range(20):
            put(handles[0], *[b"1"] * 20)

            def work(index: int) -> int:
                if index == 0:
                    carry_out(handles[0], MessageStep(write={Key(CLOSED, "q"): Write(body=b"")}))
                    return handles[0].count_waiting("q")
                return sum(len(claim(holds[index], 1)) for _ in range(10))

            closed, *_ = together(3, work)
            assert handles[0].count_waiting("q") == closed
            carry_out(handles[0], MessageStep(write={Key(CLOSED, "q"): None}))
            while claim(holds[0], 9):
                pass

    def test_claims_that_lose_replies_beside_others_lose_no_message(
        self, open_rows: OpenMessageRows
    ) -> None:
        handles = [open_rows() for _ in range(4)]
        put(handles[0], *(b"%d" % number for number in range(100)))

        def work(index: int) -> list[bytes]:
            rows, source = handles[index], random.Random(index)
            hold = rows.open_hold(b"", lease=LEASE)
            settled: list[bytes] = []
            held: list[Claimed] = []
            missed: set[ClaimReceipt] = set()
            lost: int | None = None
            for number in range(1, 60):
                found = hold.claim(["q"], 3, number=number, lost=lost).found
                receipts = {one.receipt for one in found}
                assert len(receipts) == len(found)
                assert receipts.isdisjoint(one.receipt for one in held)
                assert missed <= receipts
                if source.random() < 0.3:  # as if the reply had not come
                    lost, missed = number if lost is None else lost, receipts
                    continue
                lost, missed = None, set()
                for one in held:
                    goes = source.random() < 0.7
                    pushes = () if goes else (back(one),)
                    done = carry_out(rows, MessageStep(takes=(one.receipt,), pushes=pushes))
                    assert isinstance(done, Committed)
                    settled += [one.body] * goes
                held = found
                if source.random() < 0.1:
                    hold.end()
                    hold, held = rows.open_hold(b"", lease=LEASE), []
            hold.end()
            return settled

        settled = [body for some in together(4, work) for body in some]
        left = bodies(claim(handles[0].open_hold(b"", lease=LEASE), 100))
        assert sorted(map(int, settled + left)) == list(range(100))
