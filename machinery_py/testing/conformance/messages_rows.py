"""Promises of every store of rows with messages.

class TestMyRows(MessageRowsConformance):
    @pytest.fixture
    def open_rows(self, clock: ManualClock) -> OpenMessageRows:
        return lambda: MyRows("my://localhost", clock=clock)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

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
    StepResult,
    Write,
)
from machinery_py.rows.messages import (
    CLOSED,
    Claimed,
    ClaimReceipt,
    Hold,
    Join,
    MessageRows,
    MessageStep,
    Place,
    Push,
    Room,
    waiting_at,
)
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.waiting import together

#: Each call returns a new handle on the same store.
OpenMessageRows = Callable[[], MessageRows]

LEASE = 10.0  # seconds
SECOND = 1_000_000  # µs
SET, READY, BESIDE = Key("set", "s"), Key("ready", "s"), Key("beside", "s")


def carry_out(rows: MessageRows, step: MessageStep) -> StepResult:
    [done] = rows.commit([step])
    return done


def put(rows: MessageRows, *bodies: bytes, **more: int | str) -> None:
    puts = tuple(Push(queue="q", body=body, **more) for body in bodies)  # type: ignore[arg-type]
    assert isinstance(carry_out(rows, MessageStep(pushes=puts)), Committed)


def back(claimed: Claimed) -> Push:
    """Return the push by which a message goes back to its place."""
    return Push(queue=claimed.queue, id=claimed.receipt.id, place=Place.SAME)


def claim(hold: Hold, items: int) -> list[Claimed]:
    return hold.claim(["q"], items).found


def bodies(claimed: Sequence[Claimed]) -> list[bytes]:
    return [one.body for one in claimed]


def join(member: str, *, whole: int = 2) -> MessageStep:
    ready = Write(body=member.encode(), facts=Facts(at=1))
    one = Join(
        set=SET, member=member, whole=whole, ready=READY, write=ready, beside={BESIDE: ready}
    )
    return MessageStep(joins=(one,))


class MessageRowsConformance:
    """Tests of every promise that MessageRows adds to Rows."""

    @pytest.fixture
    def clock(self) -> ManualClock:
        """Return the clock of the store."""
        return ManualClock()

    @pytest.fixture
    def open_rows(self, clock: ManualClock) -> OpenMessageRows:
        raise NotImplementedError(f"{type(self).__name__}: override the fixture open_rows")

    def let_die(self, hold: Hold) -> None:
        """Let the process of the hold end, as far as the store can see; by default it is silent."""

    def hide(self, rows: MessageRows, hold: Hold) -> None:
        """Let its beats be all that the store can see of the hold's life; by default they are."""

    @pytest.fixture
    def rows(self, open_rows: OpenMessageRows) -> MessageRows:
        return open_rows()

    @pytest.fixture
    def hold(self, rows: MessageRows) -> Hold:
        return rows.open_hold(b"one", lease=LEASE)

    def test_message_is_claimed_once(self, rows: MessageRows, hold: Hold) -> None:
        put(rows, b"1", b"2")
        other = rows.open_hold(b"two", lease=LEASE)

        assert bodies(claim(hold, 1)) == [b"1"]
        assert bodies(claim(other, 5)) == [b"2"]
        assert claim(hold, 5) == []

    def test_receipt_takes_once(self, rows: MessageRows, hold: Hold) -> None:
        put(rows, b"1")
        [claimed] = claim(hold, 1)
        step = MessageStep(takes=(claimed.receipt,))

        assert isinstance(carry_out(rows, step), Committed)
        assert carry_out(rows, step) == Gone()

    def test_receipt_of_an_earlier_claim_takes_nothing(self, rows: MessageRows, hold: Hold) -> None:
        put(rows, b"1")
        [first] = claim(hold, 1)
        carry_out(rows, MessageStep(takes=(first.receipt,), pushes=(back(first),)))
        [second] = claim(hold, 1)

        assert carry_out(rows, MessageStep(takes=(first.receipt,))) == Gone()
        assert second.fence > first.fence
        assert hold.has([first.receipt, second.receipt]) == [False, True]

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

    def test_end_of_a_hold_gives_back_without_a_strike(self, rows: MessageRows, hold: Hold) -> None:
        put(rows, b"1")
        [claimed] = claim(hold, 1)
        hold.begin_run(claimed.receipt)
        hold.end()

        assert carry_out(rows, MessageStep(takes=(claimed.receipt,))) == Gone()
        assert claim(hold, 1) == []
        [again] = claim(rows.open_hold(b"two", lease=LEASE), 1)
        assert (again.receipt.count, again.strikes) == (2, 0)

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

    def test_fences_grow_with_those_of_claims_and_rows(self, rows: MessageRows, hold: Hold) -> None:
        first = rows.fences(3)
        put(rows, b"1")
        [claimed] = claim(hold, 1)

        assert claimed.fence > first + 2
        assert rows.fences(1) > claimed.fence

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

    def test_lost_claim_counts_among_those_of_the_next(self, rows: MessageRows, hold: Hold) -> None:
        put(rows, *[b"1"] * 9)
        lost = hold.claim(["q"], 3, number=1).found
        again = hold.claim(["q"], 2, number=2, lost=1).found

        assert [one.receipt for one in again] == [one.receipt for one in lost]
        assert rows.count_waiting("q") == 6

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

    # Who is dead

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

    def test_hold_that_beats_meanwhile_is_not_condemned(
        self, rows: MessageRows, hold: Hold, clock: ManualClock
    ) -> None:
        put(rows, b"1")
        [claimed] = claim(hold, 1)
        self.hide(rows, hold)
        rows.dead_holds()
        clock.advance(LEASE + 1.0)
        rows.dead_holds()
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
            settled = sum(isinstance(one, Committed) for one in done[:3])
            back = claim(handles[0].open_hold(b"", lease=LEASE), 9)
            assert settled + len(back) == 1
            for one in back:
                carry_out(handles[0], MessageStep(takes=(one.receipt,)))

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
