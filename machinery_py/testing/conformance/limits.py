"""Promises of every store of limits: turns in order, slots with a lease, all rules or none.

class TestMyLimits(LimitsConformance):
    @pytest.fixture
    def open_limits(self, clock: ManualClock) -> OpenLimits:
        return lambda: MyLimits("my://localhost", clock=clock)
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence

import msgspec
import pytest

from machinery_py.connections.shared_calls import SharedCalls
from machinery_py.limits.base import Admission, Entrant, Limits, Rule, Slot
from machinery_py.limits.rules import LOOK_AGAIN, MOST_WAITING, OVERDUE, SECOND
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.waiting import together

#: Each call returns a new handle on the same store.
OpenLimits = Callable[[], Limits]

RATE = Rule(name="rate", interval=0.2)  # 5/s
ONE = Rule(name="running")
LEASE = 10.0
OVER = OVERDUE / SECOND
DAY = 86_400.0  # seconds


def ask(limits: Limits, who: str, *rules: Rule, token: str = "1", again: bool = False) -> Admission:
    return limits.enter("s", who, f"{who}/{token}", rules, ttl=LEASE, again=again)


def entrant(
    who: str,
    *rules: Rule,
    scope: str = "s",
    token: str = "1",
    again: bool = False,
    order: int = 0,
) -> Entrant:
    return Entrant(
        scope=scope,
        who=who,
        token=f"{who}/{token}",
        rules=rules,
        ttl=LEASE,
        again=again,
        order=order,
    )


def ask_in_order(limits: Limits, who: str, order: int, *rules: Rule) -> Admission:
    return limits.enter_all([entrant(who, *rules, order=order)])[0]


def waits(limits: Limits, names: Sequence[str], *rules: Rule, again: bool = False) -> list[float]:
    return [ask(limits, name, *rules, again=again).wait for name in names]


def slot(limits: Limits, who: str, *rules: Rule, token: str = "1") -> Slot:
    """Return the one slot that it gets."""
    admission = ask(limits, who, *rules, token=token)
    assert admission.wait == 0.0
    (held,) = admission.held
    return held


def begun(
    limits: Limits, clock: ManualClock, names: Sequence[str], *rules: Rule
) -> Iterator[tuple[float, str, int]]:
    """Ask for each until all have begun, each at its turn; yield when it begins, and all asks."""
    begin, asks = clock.monotonic(), 0
    line = [(0.0, place, name) for place, name in enumerate(names)]
    while line:
        at, place, name = heapq.heappop(line)
        passed = clock.monotonic() - begin
        if at > passed + 1e-5:
            clock.advance(at - passed + 1e-6)
        asks += 1
        admission = ask(limits, name, *rules, token=str(asks), again=at > 0.0)
        if admission.wait:
            now = clock.monotonic() - begin
            heapq.heappush(line, (now + admission.wait, place, name))
        else:
            yield clock.monotonic() - begin, name, asks


class LimitsConformance:
    """Tests of every promise of Limits."""

    @pytest.fixture
    def clock(self) -> ManualClock:
        """Return the clock of the store."""
        return ManualClock()

    @pytest.fixture
    def open_limits(self, clock: ManualClock) -> OpenLimits:
        raise NotImplementedError(f"{type(self).__name__}: override the fixture open_limits")

    @pytest.fixture
    def limits(self, open_limits: OpenLimits) -> Limits:
        return open_limits()

    # Rates

    def test_turns_of_a_rate_are_an_interval_apart(
        self, open_limits: OpenLimits, clock: ManualClock
    ) -> None:
        one, two = open_limits(), open_limits()

        assert waits(one, "abcd", RATE) == pytest.approx([0.0, 0.2, 0.4, 0.6])
        assert ask(two, "e", RATE).wait == pytest.approx(0.8)
        clock.advance(0.1)
        assert waits(two, "edcb", RATE, again=True) == pytest.approx([0.7, 0.5, 0.3, 0.1])
        held_by = ask(one, "b", RATE)
        assert (held_by.name, held_by.key) == ("rate", "")

    def test_fifty_calls_at_five_a_second_take_ten_seconds(
        self, limits: Limits, clock: ManualClock
    ) -> None:
        names = [f"task {number}" for number in range(50)]

        began = list(begun(limits, clock, names, RATE))

        moments = [moment for moment, _, _ in began]
        assert 9.7 <= moments[-1] <= 10.0
        assert [name for _, name, _ in began] == names
        assert began[-1][2] <= 110
        assert all(later - earlier >= 0.19 for earlier, later in itertools.pairwise(moments))

    def test_burst_begins_at_once_after_a_pause(self, limits: Limits, clock: ManualClock) -> None:
        rule = Rule(name="rate", interval=0.2, limit=4)
        for _ in range(2):
            names = [f"{clock.monotonic()} {number}" for number in range(6)]
            assert waits(limits, names, rule)[:5] == pytest.approx([0.0] * 4 + [0.2])
            limits.leave([slot for name in names[4:] for slot in ask(limits, name, rule).held])
            clock.advance(100.0)

    def test_nothing_bursts_after_an_outage(self, limits: Limits, clock: ManualClock) -> None:
        names = [str(number) for number in range(20)]
        waits(limits, names, RATE)
        clock.advance(60.0)

        assert waits(limits, names[1:], RATE, again=True).count(0.0) <= 2

    def test_one_that_comes_late_delays_nobody_behind_it(
        self, limits: Limits, clock: ManualClock
    ) -> None:
        waits(limits, "abc", RATE)
        clock.advance(0.41)

        assert waits(limits, "cb", RATE, again=True) == [0.0, 0.0]

    def test_newcomer_does_not_overtake_who_waits(self, limits: Limits, clock: ManualClock) -> None:
        waits(limits, "abc", RATE)
        clock.advance(0.21)

        assert ask(limits, "new", RATE).wait > 0.0
        assert ask(limits, "b", RATE, again=True).wait == 0.0

    def test_newcomer_does_not_overtake_by_being_early(
        self, limits: Limits, clock: ManualClock
    ) -> None:
        waits(limits, "ab", RATE)
        clock.advance(0.195)

        assert ask(limits, "new", RATE).wait > 0.0

    def test_strict_interval_counts_from_the_begin(
        self, limits: Limits, clock: ManualClock
    ) -> None:
        rule = Rule(name="interval", interval=60.0, strict=True)
        assert waits(limits, "ab", rule) == pytest.approx([0.0, 60.0])
        clock.advance(59.999)
        assert ask(limits, "b", rule, again=True).wait == pytest.approx(0.001)
        clock.advance(5.0)
        assert ask(limits, "b", rule, again=True).wait == 0.0
        assert ask(limits, "c", rule).wait == pytest.approx(60.0)

    def test_longest_wait_is_until_one_looks_again(self, limits: Limits) -> None:
        rule = Rule(name="rate", interval=3600.0)

        assert waits(limits, "ab", rule) == [0.0, LOOK_AGAIN / SECOND]

    # Runs at a time

    def test_so_many_run_at_a_time_and_no_more(self, open_limits: OpenLimits) -> None:
        rule = Rule(name="running", limit=3)
        one, two = open_limits(), open_limits()

        assert [wait > 0 for wait in waits(one, "ab", rule)] == [False, False]
        assert [wait > 0 for wait in waits(two, "cde", rule)] == [False, True, True]

    def test_three_of_40_threads_get_the_three_slots(self, limits: Limits) -> None:
        rule = Rule(name="running", limit=3)

        answers = together(40, lambda number: ask(limits, str(number), rule))

        assert sum(not answer.wait for answer in answers) == 3

    def test_three_of_40_threads_that_ask_together_get_the_three_slots(
        self, limits: Limits
    ) -> None:
        rule = Rule(name="running", limit=3)
        shared = SharedCalls(limits.enter_all)

        answers = together(40, lambda number: shared.ask(entrant(str(number), rule)))

        assert sum(not answer.wait for answer in answers) == 3
        let_in = [slot.who for answer in answers if not answer.wait for slot in answer.held]
        assert let_in == [str(number) for number, one in enumerate(answers) if not one.wait]

    def test_slot_given_back_goes_to_the_first_in_line(
        self, limits: Limits, clock: ManualClock
    ) -> None:
        held = slot(limits, "a", ONE)
        waits(limits, "bcd", ONE)
        for following in "bcd":
            clock.advance(0.05)
            limits.leave([held])
            others = [name for name in "bcd" if name > following]
            assert all(wait > 0 for wait in waits(limits, [*others, "new"], ONE, again=True))
            held = slot(limits, following, ONE)

    def test_earlier_claims_go_first_whoever_asks_first(
        self, limits: Limits, clock: ManualClock
    ) -> None:
        held = slot(limits, "running", ONE)
        for who, order in (("d", 2**51 + 4), ("b", 2**51 + 2), ("a", 2**51 + 1), ("c", 2**51 + 3)):
            assert ask_in_order(limits, who, order, ONE).wait > 0
        assert ask(limits, "last", ONE).wait > 0

        line = ["a", "b", "c", "d", "last"]
        while line:
            clock.advance(0.05)
            limits.leave([held])
            # They come back with later deliveries, and keep their places.
            for later in reversed(line[1:]):
                assert ask_in_order(limits, later, 2**51 + 9, ONE).wait > 0
            answer = ask_in_order(limits, line.pop(0), 2**51 + 9, ONE)
            assert answer.wait == 0
            (held,) = answer.held

    def test_earlier_claim_goes_before_those_who_wait_for_a_rate(
        self, limits: Limits, clock: ManualClock
    ) -> None:
        assert ask_in_order(limits, "a", 1, RATE).wait == 0
        assert ask_in_order(limits, "c", 3, RATE).wait == pytest.approx(0.2)
        assert ask_in_order(limits, "b", 2, RATE).wait == pytest.approx(0.2)
        clock.advance(0.2)

        assert ask_in_order(limits, "c", 3, RATE).wait > 0.1
        assert ask_in_order(limits, "b", 2, RATE).wait == 0
        clock.advance(0.2)
        assert ask_in_order(limits, "c", 3, RATE).wait == 0

    def test_place_of_an_earlier_claim_lapses_when_nobody_comes(
        self, limits: Limits, clock: ManualClock
    ) -> None:
        held = slot(limits, "running", ONE)
        for who, order in (("c", 3), ("b", 2)):
            assert ask_in_order(limits, who, order, ONE).wait > 0
        limits.leave([held])
        assert ask_in_order(limits, "c", 3, ONE).wait > 0
        clock.advance(OVER + 5.0)

        assert ask_in_order(limits, "c", 3, ONE).wait == 0

    def test_wait_for_a_slot_follows_the_length_of_runs(
        self, limits: Limits, clock: ManualClock
    ) -> None:
        for length, most in ((0.01, 0.2), (4.0, 2.0), (600.0, 2.0)):
            held = slot(limits, "a", ONE)
            clock.advance(length)
            limits.renew([held], ttl=LEASE)
            limits.leave([held])
            held = slot(limits, "b", ONE)
            assert 0.0 < ask(limits, "c", ONE).wait <= most
            limits.leave([held, *ask(limits, "c", ONE).held])

    def test_slot_ends_with_its_lease_unless_renewed(
        self, limits: Limits, clock: ManualClock
    ) -> None:
        slot(limits, "before", ONE)
        clock.advance(LEASE)
        slot(limits, "after", ONE)
        clock.advance(LEASE)

        rule = Rule(name="running", limit=2)
        dead, alive = slot(limits, "dead", rule), slot(limits, "alive", rule)
        for _ in range(3):
            clock.advance(6.0)
            assert limits.renew([alive], ttl=LEASE) == [True]

        slot(limits, "b", rule)
        assert ask(limits, "c", rule).wait > 0.0
        assert limits.renew([dead, alive], ttl=LEASE) == [False, True]
        limits.leave([dead])
        assert ask(limits, "c", rule).wait > 0.0

    def test_new_delivery_takes_the_slot_of_the_old(self, limits: Limits) -> None:
        old = slot(limits, "a", ONE, token="1")
        waits(limits, "b", ONE)
        new = slot(limits, "a", ONE, token="2")

        assert limits.renew([old, new], ttl=LEASE) == [False, True]
        limits.leave([old])
        assert ask(limits, "b", ONE, again=True).wait > 0.0
        limits.leave([new])
        assert ask(limits, "b", ONE, again=True).wait == 0.0

    def test_forgotten_slot_is_taken_again_if_there_is_room(
        self, limits: Limits, clock: ManualClock
    ) -> None:
        slots = [Slot(scope="s", name="running", key="", who=who, token=who) for who in "ab"]

        assert limits.renew(slots, ttl=LEASE) == [True, True]
        assert ask(limits, "c", ONE).wait > 0.0
        clock.advance(LEASE)
        limits.leave(slots[:1])
        third = Slot(scope="s", name="running", key="", who="c", token="c")
        assert limits.renew([third], ttl=LEASE) == [True]

    # Places in line, repeats, several rules

    @pytest.mark.parametrize("rule", [RATE, ONE], ids=lambda rule: rule.name)
    def test_repeat_after_a_lost_reply_is_counted_once(self, limits: Limits, rule: Rule) -> None:
        first = ask(limits, "a", rule)
        assert ask(limits, "a", rule) == first
        once = ask(limits, "b", rule).wait
        assert 0.0 < once <= 0.2
        assert ask(limits, "b", rule).wait == pytest.approx(once)

    @pytest.mark.parametrize("rule", [RATE, ONE], ids=lambda rule: rule.name)
    def test_place_in_line_lapses_when_nobody_comes(
        self, limits: Limits, clock: ManualClock, rule: Rule
    ) -> None:
        held = ask(limits, "a", rule).held
        waits(limits, "bcd", rule)
        clock.advance(1.0)
        limits.leave(held)
        clock.advance(OVER + 6.0)

        assert ask(limits, "new", rule).wait == 0.0

    def test_clock_that_was_a_day_ahead_keeps_no_slot_and_no_place(
        self, limits: Limits, clock: ManualClock
    ) -> None:
        """A run and one in line have died before the clock was set back."""
        clock.set_back(-DAY)
        slot(limits, "dead", ONE)
        ask(limits, "gone", ONE)
        clock.set_back(DAY)

        assert ask(limits, "new", ONE).wait > 0.0
        clock.advance(LOOK_AGAIN / SECOND + OVER)
        assert ask(limits, "new", ONE, again=True).wait == 0.0

    def test_who_gives_up_leaves_the_line(self, limits: Limits) -> None:
        ask(limits, "a", RATE)
        limits.leave(ask(limits, "b", RATE).held)

        assert ask(limits, "c", RATE).wait == pytest.approx(0.2)

    def test_all_rules_let_in_or_none_counts(self, limits: Limits, clock: ManualClock) -> None:
        held = ask(limits, "a", ONE, RATE).held
        assert [one.name for one in held] == ["running"]
        clock.advance(1.0)

        refused = ask(limits, "b", ONE, RATE)
        assert (refused.wait > 0.0, refused.name) == (True, "running")
        assert ask(limits, "c", RATE).wait == 0.0
        limits.leave(held)
        refused = ask(limits, "b", ONE, RATE, again=True)
        assert (refused.wait > 0.0, refused.name) == (True, "rate")
        assert ask(limits, "d", ONE).wait == 0.0

    def test_full_key_delays_no_other(self, limits: Limits) -> None:
        shared = Rule(name="running", limit=2)
        full, other = (Rule(name="rate", key=key, interval=60.0) for key in ("full", "other"))
        ask(limits, "a", shared, full)
        assert all(wait > 0 for wait in waits(limits, "bcde", shared, full))

        assert ask(limits, "f", shared, other).wait == 0.0
        assert limits.enter("another scope", "g", "g", [full], ttl=LEASE).wait == 0.0

    def test_line_has_so_many_places_and_turns_go_on(self, limits: Limits) -> None:
        names = [str(number) for number in range(MOST_WAITING + 10)]

        told = waits(limits, names, Rule(name="rate", interval=0.1))

        assert told == pytest.approx([number / 10 for number in range(len(names))])
        assert limits.read()[0].usage[0].waiting == MOST_WAITING

    def test_more_wait_than_there_are_places(self, limits: Limits, clock: ManualClock) -> None:
        names = [str(number) for number in range(MOST_WAITING + 40)]

        began = list(begun(limits, clock, names, Rule(name="rate", interval=0.02)))

        assert sorted(name for _, name, _ in began) == sorted(names)
        assert began[-1][0] == pytest.approx(len(names) * 0.02, rel=0.1)
        assert began[-1][2] <= 2.2 * len(names)

    def test_those_without_a_place_come_back_one_by_one(self, limits: Limits) -> None:
        run = slot(limits, "first", ONE)
        names = [str(number) for number in range(MOST_WAITING + 40)]
        admissions = [ask(limits, name, ONE) for name in names]

        told = [one.wait for one in admissions[MOST_WAITING:]]
        assert told[0] >= 10.0
        assert told == pytest.approx([told[0] + number / 100 for number in range(40)])
        # If they never come, those that are new do not wait for them.
        limits.leave([place for one in admissions[:MOST_WAITING] for place in one.held])
        limits.leave([run])
        slot(limits, "new", ONE)
        assert 0.0 < ask(limits, "newer", ONE).wait < 1.0

    def test_newcomers_do_not_wait_for_those_who_never_came(
        self, limits: Limits, clock: ManualClock
    ) -> None:
        rate = Rule(name="rate", interval=1.0)
        waits(limits, [str(number) for number in range(MOST_WAITING + 40)], rate)

        clock.advance(MOST_WAITING + 11.0)  # their places have lapsed, some turns have not come

        assert waits(limits, ["new", "newer"], rate) == [0.0, pytest.approx(1.0)]

    def test_each_that_asks_together_is_answered_as_if_alone(
        self, limits: Limits, clock: ManualClock
    ) -> None:
        tenant = Rule(name="running", key="acme")
        slow = Rule(name="rate", key="acme", interval=60.0)
        limits.change("t", [RATE])
        askings = [
            *(entrant(who, RATE) for who in "cab"),
            entrant("c", RATE),  # a repeat
            entrant("d", ONE, tenant),
            entrant("e", tenant, slow),
            entrant("f", msgspec.structs.replace(slow, key="other")),
            *(entrant(who, slow, scope="t") for who in "gh"),
            entrant("i", RATE, again=True),
        ]

        answers = limits.enter_all(askings)

        waits = [one.wait for one in answers]
        assert waits[:5] == pytest.approx([0.0, 0.2, 0.4, 0.0, 0.0])
        assert (waits[5] > 0.0, answers[5].name, answers[5].key) == (True, "running", "acme")
        assert waits[6:] == pytest.approx([0.0, 0.0, 0.2, 0.6])
        assert {slot.who for slot in answers[1].held} == {"a"}
        assert [slot.name for slot in answers[4].held] == ["running", "running"]
        again = [msgspec.structs.replace(one, again=True) for one in askings]
        assert [one.wait for one in limits.enter_all(again)] == pytest.approx(waits)
        assert limits.enter_all([]) == []
        clock.advance(0.2)
        assert limits.enter_all(again[1:3])[0].wait == 0.0

    # Changes and reports

    def test_changed_limit_wins_until_it_is_reset(
        self, open_limits: OpenLimits, clock: ManualClock
    ) -> None:
        one, two = open_limits(), open_limits()
        rule, tenant = Rule(name="rate", interval=60.0), Rule(name="rate", key="t", interval=60.0)
        assert waits(one, "ab", rule) == [0.0, 60.0]

        two.change("s", [RATE])
        assert ask(one, "c", rule).wait <= 0.6
        assert waits(one, "ab", tenant) == pytest.approx([0.0, 0.2])
        assert [report.changed for report in one.read()] == [(RATE,)]
        assert {scope: list(rules) for scope, rules in one.changed().items()} == {"s": [RATE]}
        assert one.enter("other", "a", "a", [rule], ttl=LEASE).wait == 0.0
        assert one.enter("other", "b", "b", [rule], ttl=LEASE).wait == 60.0
        two.change("s", [])
        assert ask(one, "d", tenant).wait > 60.0
        assert {report.changed for report in one.read()} == {()}
        assert not one.changed()

    def test_lowered_limit_holds_for_runs_at_a_time(self, limits: Limits) -> None:
        three, none = Rule(name="running", limit=3), Rule(name="running", limit=0)
        held = slot(limits, "a", three)
        limits.change("s", [none])

        assert ask(limits, "b", three).wait > 0.0
        assert limits.renew([held], ttl=LEASE) == [True]
        limits.change("s", [three])
        assert ask(limits, "b", three, again=True).wait == 0.0

    def test_reports_say_what_runs_and_waits(self, limits: Limits) -> None:
        assert limits.read() == []
        tenant = Rule(name="running", key="acme", limit=2)
        waits(limits, "abcde", tenant)
        waits(limits, "fgh", RATE)
        limits.enter("another", "a", "a", [ONE], ttl=LEASE)

        another, here = limits.read()

        assert (another.scope, here.scope) == ("another", "s")
        rate, running = here.usage
        assert (rate.name, rate.limit, rate.interval, rate.waiting) == ("rate", 1, 0.2, 2)
        assert rate.wait == pytest.approx(0.6, abs=0.1)
        assert (running.name, running.key, running.limit) == ("running", "acme", 2)
        assert (running.running, running.waiting) == (2, 3)
        assert running.wait > 0.0

    def test_any_text_is_a_name(self, limits: Limits) -> None:
        names = ["", "a b", "日本", "{a}", "}{", "%", "x:y", "a\0b", "\n", "\udcff", "x" * 100_000]
        for name in names:
            rule = Rule(name="running", key=name)
            admission = limits.enter(name, name, f"{name}1", [rule], ttl=LEASE)
            assert admission.wait == 0.0
            assert limits.renew(admission.held, ttl=LEASE) == [True]
            assert limits.enter(name, f"{name}2", f"{name}2", [rule], ttl=LEASE).wait > 0.0
        assert len(limits.read()) == len(names)

    def test_closing_the_store_keeps_what_is_held(self, open_limits: OpenLimits) -> None:
        limits = open_limits()
        slot(limits, "a", ONE)
        limits.close()
        limits.close()

        assert ask(open_limits(), "b", ONE).wait > 0.0
