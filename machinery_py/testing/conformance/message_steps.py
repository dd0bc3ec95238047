"""Promises of steps with messages: what they take, push, join and write, or leave alone."""

from __future__ import annotations

import pytest

from machinery_py.clock import micros
from machinery_py.errors import NameRefused
from machinery_py.rows.contract import (
    ID_BYTES,
    NO_ROW,
    Committed,
    Conflict,
    Facts,
    Gone,
    Key,
    NoRoom,
    Repeated,
    Write,
)
from machinery_py.rows.messages import (
    ClaimReceipt,
    Hold,
    MessageRows,
    MessageStep,
    Place,
    Push,
    Room,
    waiting_at,
)
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.message_case import (
    BESIDE,
    LEASE,
    READY,
    SECOND,
    SET,
    MessageCase,
    OpenMessageRows,
    bodies,
    carry_out,
    claim,
    join,
    put,
)
from machinery_py.testing.waiting import together


class MessageStepConformance(MessageCase):
    """Tests of MessageRows.commit."""

    def test_receipt_takes_once(self, rows: MessageRows, hold: Hold) -> None:
        put(rows, b"1")
        [claimed] = claim(hold, 1)
        step = MessageStep(takes=(claimed.receipt,))

        assert isinstance(carry_out(rows, step), Committed)
        assert carry_out(rows, step) == Gone()

    def test_lost_step_writes_nothing(self, rows: MessageRows) -> None:
        step = MessageStep(
            held=(ClaimReceipt("nobody", 1, 1),),
            write={SET: Write(body=b"1")},
            create={READY: Write(body=b"1")},
            pushes=(Push(queue="q", body=b"1"),),
        )
        assert carry_out(rows, step) == Gone()
        assert rows.read([SET, READY]) == [None, None]
        assert rows.count_waiting("q") == 0

    def test_step_in_conflict_takes_and_puts_nothing(self, rows: MessageRows, hold: Hold) -> None:
        put(rows, b"1")
        [claimed] = claim(hold, 1)
        carry_out(rows, MessageStep(write={SET: Write(body=b"1")}))
        step = MessageStep(
            expect={SET: NO_ROW},
            takes=(claimed.receipt,),
            pushes=(Push(queue="q", body=b"2"),),
        )
        assert carry_out(rows, step) == Conflict()
        assert hold.has([claimed.receipt]) == [True]
        assert rows.count_waiting("q") == 0

    def test_step_without_room_puts_nothing(self, rows: MessageRows) -> None:
        put(rows, b"1")
        room = Room(queue="q", limit=2, adds=2)
        step = MessageStep(
            room=(room,),
            pushes=(
                Push(queue="q", body=b"2"),
                Push(queue="q", body=b"3"),
            ),
        )

        assert carry_out(rows, step) == NoRoom("q", 1)
        assert rows.count_waiting("q") == 1

    def test_dropped_message_is_gone_and_a_held_one_is_not_dropped(
        self, rows: MessageRows, hold: Hold
    ) -> None:
        put(rows, b"1", b"2")
        first, second = rows.messages("q")
        [claimed] = claim(hold, 1)

        assert carry_out(rows, MessageStep(takes=(waiting_at(first.id),))) == Gone()
        assert isinstance(carry_out(rows, MessageStep(takes=(waiting_at(second.id),))), Committed)
        assert claim(hold, 5) == []
        assert hold.has([claimed.receipt]) == [True]

    def test_of_writes_of_one_row_in_a_step_the_last_wins(self, rows: MessageRows) -> None:
        new = Key("kind", "new")
        first, second = Write(body=b"1"), Write(body=b"2")
        step = join("joined")
        step.create = {new: first, BESIDE: first}
        step.write = {new: second, READY: second}
        again = join("once more", whole=1)
        again.write = {BESIDE: second}

        carry_out(rows, step)
        assert [row and row.body for row in rows.read([new, BESIDE, READY])] == [b"2", b"1", b"2"]
        carry_out(rows, MessageStep(write={READY: None}))
        carry_out(rows, again)
        assert [row and row.body for row in rows.read([BESIDE, READY])] == [b"once more"] * 2

    def test_row_that_is_there_is_not_created(self, rows: MessageRows) -> None:
        for body in (b"1", b"2"):
            carry_out(rows, MessageStep(create={SET: Write(body=body)}))

        [row] = rows.read([SET])
        assert row is not None
        assert row.body == b"1"

    def test_whole_set_makes_its_row_once(self, rows: MessageRows) -> None:
        carry_out(rows, join("a"))
        carry_out(rows, join("a"))
        assert rows.list("ready") == []

        carry_out(rows, join("b"))
        [ready] = rows.list("ready")
        carry_out(rows, join("c"))
        assert rows.list("ready") == [ready]
        assert ready.body == b"b"

    def test_set_that_was_deleted_begins_anew(self, rows: MessageRows) -> None:
        carry_out(rows, join("a"))
        carry_out(rows, MessageStep(write={SET: None}))
        carry_out(rows, join("b"))

        assert rows.read([READY]) == [None]

    def test_member_with_a_name_that_is_too_long_is_refused(self, rows: MessageRows) -> None:
        with pytest.raises(NameRefused):
            carry_out(rows, join("x" * (ID_BYTES + 1), whole=1))

        assert rows.read([READY]) == [None]

    def test_member_that_is_added_writes_what_is_beside(self, rows: MessageRows) -> None:
        carry_out(rows, join("a"))
        carry_out(rows, MessageStep(write={BESIDE: None}))
        carry_out(rows, join("a"))

        assert rows.read([BESIDE]) == [None]

    def test_row_lives_while_the_row_that_keeps_it(
        self, rows: MessageRows, clock: ManualClock
    ) -> None:
        kept = Write(body=b"1", expires_in=SECOND, kept_by=SET)
        carry_out(rows, MessageStep(write={READY: kept, SET: Write(body=b"")}))
        clock.advance(2.0)
        rows.expire(10)
        assert rows.read([READY]) != [None]

        carry_out(rows, MessageStep(write={SET: None}))
        assert rows.read([READY]) == [None]

    def test_told_topic_wakes_its_listener(self, rows: MessageRows) -> None:
        listener = rows.listen()
        listener.watch(["x"])
        carry_out(rows, MessageStep(tell=("x",)))

        listener.wait(30.0)  # returns at once
        listener.close()

    def test_ids_are_found_by_their_beginning(self, rows: MessageRows) -> None:
        write: dict[Key, Write | None] = {
            Key("k", id): Write(body=b"") for id in ("ab", "b", "aa", "a")
        }
        carry_out(rows, MessageStep(write=write))

        assert rows.ids("k", prefix="a") == ["a", "aa", "ab"]
        assert rows.ids("k", prefix="a", items=1) == ["a"]

    def test_listed_rows_are_counted_by_name_and_time(
        self, rows: MessageRows, clock: ManualClock
    ) -> None:
        def listed(name: str, at: int, seconds: int = 60) -> Write:
            return Write(body=b"", expires_in=seconds * SECOND, facts=Facts(at=at, name=name))

        write: dict[Key, Write | None] = {
            Key("k", "a"): listed("x", 11),
            Key("k", "b"): listed("y", 12),
            Key("k", "c"): listed("x", 19),
            Key("k", "d"): listed("x", 20),
            Key("k", "over"): listed("x", 12, seconds=1),
            Key("k", "not listed"): Write(body=b""),
            Key("other", "a"): listed("x", 12),
        }
        carry_out(rows, MessageStep(write=write))
        clock.advance(2.0)

        assert rows.count("k") == {("x", 0): 3, ("y", 0): 1}
        assert rows.count("k", since=12, step=10) == {("y", 10): 1, ("x", 10): 1, ("x", 20): 1}

    def test_message_goes_on_in_another_queue(self, rows: MessageRows, hold: Hold) -> None:
        put(rows, b"1")
        [waiting] = rows.messages("q")
        step = MessageStep(
            takes=(waiting_at(waiting.id),), pushes=(Push(queue="other", id=waiting.id),)
        )

        assert isinstance(carry_out(rows, step), Committed)
        assert claim(hold, 1) == []
        [claimed] = hold.claim(["other"], 1).found
        assert (claimed.receipt.id, claimed.body) == (waiting.id, b"1")
        assert carry_out(rows, step) == Gone()

    def test_message_that_goes_on_with_another_body_keeps_its_count(
        self, rows: MessageRows, hold: Hold, clock: ManualClock
    ) -> None:
        put(rows, b"1")
        [first] = claim(hold, 1)
        due = micros(clock.now()) + SECOND
        later = Push(queue="q", id=first.receipt.id, body=b"2", due=due)
        carry_out(rows, MessageStep(takes=(first.receipt,), pushes=(later,)))
        assert claim(hold, 1) == []
        clock.advance(1.0)

        [second] = claim(hold, 1)
        assert (second.body, second.receipt.count, second.put_at) == (b"2", 2, first.put_at)

    @pytest.mark.parametrize("late", [False, True])
    def test_message_that_was_not_claimed_is_pushed_again_as_it_was(
        self, rows: MessageRows, clock: ManualClock, late: bool
    ) -> None:
        due = micros(clock.now()) + SECOND if late else 0
        put(rows, b"1", b"2", due=due)
        [first, _] = rows.messages(None if late else "q")
        for body in (b"3", b"4"):
            again = Push(queue="q", id=first.id, body=body, due=due)
            step = MessageStep(takes=(waiting_at(first.id),), pushes=(again,))
            assert isinstance(carry_out(rows, step), Committed)
        clock.advance(1.0)

        found = claim(rows.open_hold(b"one", lease=LEASE), 9)
        assert sorted(bodies(found)) == [b"2", b"4"]

    def test_waiting_message_gets_another_body_at_its_place(
        self, rows: MessageRows, hold: Hold, clock: ManualClock
    ) -> None:
        due = micros(clock.now()) + 1_000_000
        put(rows, b"1", b"2")
        put(rows, b"3", b"4", due=due)
        for queue, place, moment in (("q", Place.SAME, 0), (None, Place.LAST, due)):
            [first] = rows.messages(queue, items=1)
            push = Push(queue="q", id=first.id, body=b"new", place=place, due=moment)
            step = MessageStep(takes=(waiting_at(first.id),), pushes=(push,))
            assert isinstance(carry_out(rows, step), Committed)

        assert bodies(claim(hold, 9)) == [b"new", b"2"]
        clock.advance(2.0)
        assert bodies(claim(hold, 9)) == [b"new", b"4"]

    def test_what_a_step_pushed_once_does_not_come_again(
        self, rows: MessageRows, hold: Hold
    ) -> None:
        token = Key("token", "t")
        step = MessageStep(
            once=token, write={token: Write(body=b"")}, pushes=(Push(queue="q", body=b"1"),)
        )
        carry_out(rows, step)
        [claimed] = claim(hold, 1)
        carry_out(rows, MessageStep(takes=(claimed.receipt,)))

        assert carry_out(rows, step) == Repeated()
        assert claim(hold, 1) == []

    def test_step_of_a_held_message_leaves_it_held(self, rows: MessageRows, hold: Hold) -> None:
        put(rows, b"1")
        [claimed] = claim(hold, 1)
        step = MessageStep(held=(claimed.receipt,), write={BESIDE: Write(body=b"")})

        assert isinstance(carry_out(rows, step), Committed)
        assert isinstance(carry_out(rows, MessageStep(takes=(claimed.receipt,))), Committed)
        assert carry_out(rows, step) == Gone()

    def test_once_goes_before_expect_and_expect_before_receipts(self, rows: MessageRows) -> None:
        carry_out(rows, MessageStep(write={SET: Write(body=b"")}))
        step = MessageStep(once=SET, expect={SET: NO_ROW}, takes=(waiting_at(7),))
        step.write[SET] = Write(body=b"")

        assert carry_out(rows, step) == Repeated()
        step.once = None
        assert carry_out(rows, step) == Conflict()

    def test_last_two_of_a_set_who_come_together_make_it_whole_once(
        self, open_rows: OpenMessageRows
    ) -> None:
        handles = [open_rows() for _ in range(4)]

        def work(index: int) -> None:
            for number in range(25):
                carry_out(handles[index], join(f"{index} {number}", whole=100))

        together(4, work)
        assert len(handles[0].list("ready")) == 1
        [row] = handles[0].read([SET])
        assert row is not None
