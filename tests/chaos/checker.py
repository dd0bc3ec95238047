"""Find what is wrong with a history, from the plan, the ledgers and the faults; trust no store.

Numbers I2, I4 … are those of RELIABILITY.md 4.1. A run that was not drained is invalid.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

from machinery_py.tasks.states import State
from tests.chaos.app import digest
from tests.chaos.history import RANK, Final, Happened, History, Run, Sent
from tests.chaos.plan import Call, result_of
from tests.chaos.repeats import EXPLAINS, ZOMBIE, Repeats

ETA_TOLERANCE = 0.002  # seconds
MAX_STRIKES = 3
SHOWN = 40  # violations on the page
UNFINISHED = 10  # tasks that are shown when a run was not drained


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """Something that must not be."""

    rule: str
    uuid: str
    text: str
    timeline: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Verdict:
    """What the checker says."""

    violations: list[Violation] = field(default_factory=list)
    figures: dict[str, object] = field(default_factory=dict)
    valid: bool = True

    @property
    def passed(self) -> bool:
        return self.valid and not self.violations

    @property
    def word(self) -> str:
        return "INVALID" if not self.valid else "FAILED" if self.violations else "PASSED"

    def as_dict(self) -> dict[str, object]:
        return {
            "verdict": self.word,
            "figures": self.figures,
            "violations": [asdict(one) for one in self.violations],
        }

    def rules(self) -> set[str]:
        return {one.rule for one in self.violations}

    def page(self, title: str) -> str:
        """One page for people."""
        lines = [f"chaos: {self.word}   {title}", ""]
        lines += [f"  {name:<28} {value}" for name, value in self.figures.items()]
        counts = Counter(one.rule for one in self.violations)
        lines += [
            "",
            "no violation"
            if not counts
            else "violations: " + ", ".join(f"{n} × {rule}" for rule, n in counts.items()),
        ]
        for one in self.violations[:SHOWN]:
            lines += [
                f"- {one.rule} {one.uuid}: {one.text}",
                *(f"      {line}" for line in one.timeline),
            ]
        return "\n".join(lines) + "\n"


def check(history: History) -> Verdict:
    """All that is wrong, and the figures."""
    checker = _Checker(history)
    if not history.drained:
        why = [Violation(rule="not drained", uuid="", text=text) for text in history.left]
        waiting = itertools.islice(
            (one for one in checker.outcomes() if one.rule == "lost"), UNFINISHED
        )
        return Verdict(valid=False, figures=checker.figures(), violations=[*why, *waiting])
    rules: tuple[Callable[[], Iterator[Violation]], ...] = (
        checker.outcomes,
        checker.unexpected,
        checker.completed_twice,
        checker.repeats,
        checker.fences,
        checker.arguments,
        checker.order,
        checker.monotone,
        checker.retries,
        checker.too_early,
        checker.leftovers,
    )
    return Verdict(violations=[one for rule in rules for one in rule()], figures=checker.figures())


class _Checker:
    """One rule a method; each yields what breaks it."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.calls = history.calls
        self.runs = history.runs_of()
        self.repeated = Repeats(history, self.runs)
        self._due: dict[str, bool | None] = {}

    # What must be there

    def outcomes(self) -> Iterator[Violation]:
        """I2, I5, I6: each accepted or implied call ended as planned; no other one was made."""
        for call in self.calls.values():
            yield from self._outcome(call)
        for uuid, sent in self.history.sent.items():
            if sent.parent and sent.word == "accepted" and not self._is_over(uuid):
                yield self._violation(
                    "lost", uuid, f"accepted from task {sent.parent}, and never finished"
                )

    def _outcome(self, call: Call) -> Iterator[Violation]:
        due, state = self._is_due(call), self.history.states.get(call.uuid)
        if due is None:
            return  # nobody knows whether it was stored
        if not due:
            if self.runs.get(call.uuid):
                yield self._violation(
                    "unexpected", call.uuid, "ran, though what it follows never called for it"
                )
            return
        if not self._is_over(call.uuid):
            at = state.state if state else "no state"
            yield self._violation(
                "lost",
                call.uuid,
                f"{call.task} was accepted, or had to follow, and is {at} after the drain",
            )
            return
        assert state is not None
        if self._failed_member(call):
            yield from self._never_ran(call, state)
        elif state.error_type == "Poison":
            yield from self._given_up(call.uuid)
        elif (state.state is State.FAILURE) != call.fails:
            yield self._violation(
                "wrong outcome", call.uuid, f"{call.task} is {state.state}: {state.error}"
            )
        elif not self.runs.get(call.uuid):
            yield self._violation("lost", call.uuid, f"{call.task} is {state.state}, and never ran")
        elif state.state is State.SUCCESS and list(state.results) != [
            result_of(call, self._given(call))
        ]:
            yield self._violation(
                "wrong result",
                call.uuid,
                f"{state.results} (expected {result_of(call, self._given(call))})",
            )

    def _never_ran(self, call: Call, state: Final) -> Iterator[Violation]:
        count = len(self.runs.get(call.uuid, ()))
        if state.state is not State.FAILURE or count:
            must = "a member failed, so it must fail and never run"
            text = f"is {state.state}, ran {count} times; {must}"
            yield self._violation("chord", call.uuid, text)

    def _given_up(self, uuid: str) -> Iterator[Violation]:
        strikes = self.history.strikes.get(uuid, MAX_STRIKES)
        cut_off = sum(
            self.repeated.was_taken(one, one.start + 1e9) for one in self.runs.get(uuid, ())
        ) + self.repeated.lost_processes(self.runs.get(uuid, ()))
        if cut_off < strikes:
            yield self._violation(
                "blamed",
                uuid,
                f"given up after {strikes} strikes; faults hit only {cut_off} of its runs",
            )

    def _is_due(self, call: Call) -> bool | None:
        """Whether it must be there; None if that cannot be known."""
        if call.uuid not in self._due:
            self._due[call.uuid] = self._find_due(call)
        return self._due[call.uuid]

    def _find_due(self, call: Call) -> bool | None:
        if call.is_sent:
            sent = self.history.sent.get(call.uuid)
            if sent is None or sent.word == "refused":
                return False
            return True if sent.word == "accepted" or self._was_seen(call.uuid) else None
        if call.gathers:
            # A failed member ends the chord; so does one that cannot come since its parent failed.
            heads = [self._is_due(self.calls[uuid]) for uuid in call.gathers]
            return None if None in heads else any(heads) or self._reached(call)
        parent = call.follows or call.catches
        due = self._is_due(self.calls[parent])
        if not due:
            return due
        wanted = State.SUCCESS if call.follows else State.FAILURE
        state = self.history.states.get(parent)
        return state is not None and state.state is wanted

    def _reached(self, call: Call) -> bool:
        """Whether a failure in front of the members has ended the chord."""
        return call.uuid in self.history.states

    def _was_seen(self, uuid: str) -> bool:
        state = self.history.states.get(uuid)
        # With two stores the state is written first, and the message may never have been stored.
        alone = self.history.doubles and state is not None and state.state is State.PENDING
        return (state is not None and not alone) or uuid in self.runs

    def _is_over(self, uuid: str) -> bool:
        state = self.history.states.get(uuid)
        return state is not None and state.state.is_finished

    def _failed_member(self, call: Call) -> str:
        for uuid in call.gathers:
            state = self.history.states.get(uuid)
            if state is None or state.state is not State.SUCCESS:
                return uuid
        return ""

    def _given(self, call: Call) -> list[float]:
        """The results that it must have been given."""
        parents = call.gathers or ((call.follows,) if call.follows else ())
        return [result_of(self.calls[uuid], self._given(self.calls[uuid])) for uuid in parents]

    # What must not be there

    def unexpected(self) -> Iterator[Violation]:
        """I3: what ran was sent by somebody."""
        for uuid in self.runs:
            if uuid not in self.calls and uuid not in self.history.sent:
                yield self._violation("unexpected", uuid, "ran, and nobody sent it")

    def completed_twice(self) -> Iterator[Violation]:
        """I4: of each run one outcome became true; the store has counted no more of them either."""
        counts = Counter((one.uuid, one.run) for one in self.history.settled)
        for (uuid, run), count in counts.items():
            if count > 1:
                yield self._violation(
                    "completed twice", uuid, f"run {run} was settled {count} times"
                )
        over = sum(state.state.is_finished for state in self.history.states.values())
        if self.history.finished is not None and self.history.finished != over:
            yield Violation(
                rule="completed twice",
                uuid="",
                text=f"the store counted {self.history.finished} ends of {over} tasks",
            )
        for one in self.history.settled:
            state = self.history.states.get(one.uuid)
            if one.state != "RETRY" and state is not None and state.state != one.state:
                yield self._violation(
                    "completed twice", one.uuid, f"settled as {one.state}, and is {state.state}"
                )

    def repeats(self) -> Iterator[Violation]:
        """I11: each execution after the first follows a fault that hit the one before."""
        for uuid, runs in self.runs.items():
            by_run: dict[int, list[Run]] = defaultdict(list)
            for one in runs:
                by_run[one.run].append(one)
            for same in by_run.values():
                for before, after in itertools.pairwise(same):
                    if not self.repeated.is_explained(before, after):
                        rule = (
                            "chord fired twice"
                            if uuid in self.calls and self.calls[uuid].gathers
                            else "unexplained repeat"
                        )
                        yield self._violation(
                            rule,
                            uuid,
                            f"ran on {before.worker}, and {after.start - before.start:.3f} s later "
                            f"on {after.worker}; no fault hit the first (fences "
                            f"{before.fence}, {after.fence})",
                        )

    def fences(self) -> Iterator[Violation]:
        """I9: each execution has its own fence; only the greatest settles, with none after it."""
        for uuid, runs in self.runs.items():
            for number, count in Counter((one.run, one.fence) for one in runs).items():
                if count > 1:
                    yield self._violation(
                        "fence",
                        uuid,
                        f"{count} executions of run {number[0]} have the fence {number[1]}",
                    )
            for one in runs:
                if one.settled is not None and one.fence < max(
                    other.fence for other in runs if other.run == one.run
                ):
                    yield self._violation(
                        "fence", uuid, f"settled with the fence {one.fence}, which was not the last"
                    )

    def arguments(self) -> Iterator[Violation]:
        """I6, I7: each execution got its own arguments, and the earlier results in order."""
        for call in self.calls.values():
            runs = self.runs.get(call.uuid, ())
            if not runs:
                continue
            values: list[object] = [*call.args, *self._given(call)]
            if call.catches:
                caught = self.history.states.get(call.catches)
                values = [caught.error if caught else "", *call.args]
            wanted = digest(values)
            if any(one.digest not in ("", wanted) for one in runs):
                yield self._violation(
                    "wrong arguments", call.uuid, f"{call.task} was not called with {values!r:.200}"
                )

    def order(self) -> Iterator[Violation]:
        """I6, I7: nothing starts before those in front of it have come to an end."""
        ends = {
            uuid: min((one.end for one in runs if one.end is not None), default=None)
            for uuid, runs in self.runs.items()
        }
        for call in self.calls.values():
            runs = self.runs.get(call.uuid)
            if not runs:
                continue
            for uuid in (*call.gathers, call.follows, call.catches):
                if (
                    uuid in self.runs
                    and ((end := ends[uuid]) is None or runs[0].start < end)
                    and not self._is_given_up(uuid)
                ):
                    yield self._violation("order", call.uuid, f"started before {uuid} had ended")

    def _is_given_up(self, uuid: str) -> bool:
        state = self.history.states.get(uuid)
        return state is not None and state.error_type == "Poison"

    def monotone(self) -> Iterator[Violation]:
        """I8: a state never goes back, and a final one never changes."""
        for uuid, seen in self.history.samples.items():
            for before, after in itertools.pairwise(seen):
                back = (after[0], RANK[after[1]]) < (before[0], RANK[before[1]])
                if back or (before[1].is_finished and after != before):
                    text = f"{before[1]} of run {before[0]}, then {after[1]} of run {after[0]}"
                    yield self._violation("state went back", uuid, text)

    def retries(self) -> Iterator[Violation]:
        """I10: a task that fails k times is tried k + 1 times, no matter how many workers died.

        Each task process that was lost adds one.
        """
        for call in self.calls.values():
            runs = self.runs.get(call.uuid)
            if not runs or self._is_given_up(call.uuid):
                continue
            noted = {(one.run, one.worker) for one in runs}
            # Of a run that began on another worker before, its process may be lost unseen as well.
            unseen = {run for run, _ in self.repeated.lost_runs(call.uuid) - noted}
            found = sorted({run for run, _ in noted} | unseen)
            most = call.retries + len(unseen)
            if len(found) > most + 1:
                most += self.repeated.lost_processes(runs)
            if found != list(range(len(found))) or not call.retries < len(found) <= most + 1:
                yield self._violation("retries", call.uuid, f"runs {found} (expected 0 to {most})")

    def too_early(self) -> Iterator[Violation]:
        """I13: nothing starts before its ETA."""
        for uuid, sent in self.history.sent.items():
            for one in self.runs.get(uuid, ()):
                if one.started_at and one.started_at < sent.eta - ETA_TOLERANCE:
                    yield self._violation(
                        "too early", uuid, f"{sent.eta - one.started_at:.3f} s before its ETA"
                    )

    def leftovers(self) -> Iterator[Violation]:
        """I20, and workers that did not do as they were told."""
        for text in self.history.left:
            yield Violation(rule="left behind", uuid="", text=text)
        for text in self.history.incidents:
            yield Violation(rule="worker", uuid="", text=text)

    # Figures

    def figures(self) -> dict[str, object]:
        history = self.history
        accepted = sum(sent.word == "accepted" for sent in history.sent.values())
        faults = Counter(fault.kind for fault in history.faults)
        extra = sum(len(runs) - len({one.run for one in runs}) for runs in self.runs.values())
        figures: dict[str, object] = {
            "accepted by senders": accepted,
            "unknown to senders": sum(sent.word == "unknown" for sent in history.sent.values()),
            "tasks that ended": sum(state.state.is_finished for state in history.states.values()),
            "executions": len(history.runs),
            "executions repeated": extra,
            "executions by zombies": sum(
                one.settled is None and self.repeated.is_zombie(one) for one in self.history.runs
            ),
            "chords": sum(bool(call.gathers) for call in self.calls.values()),
            "given up (dead letters)": len(history.strikes),
            "tasks sampled": len(history.samples),
            "faults": ", ".join(f"{count} {kind}" for kind, count in sorted(faults.items()))
            or "none",
        }
        for kind in sorted(EXPLAINS):
            if times := self._recovery(kind):
                figures[f"recovery after {kind}"] = shown(times)
        if late := self._lateness():
            figures["start after ETA"] = shown(late)
        return figures

    def _recovery(self, kind: str) -> list[float]:
        """Seconds from a fault to the next start of each task that its process was running."""
        times: list[float] = []
        for fault in self.history.faults:
            if fault.kind != kind:
                continue
            for one in self._running_on(fault):
                later = (
                    run.start
                    for run in self.runs[one.uuid]
                    if run.run == one.run and run.start > fault.start
                )
                if (again := min(later, default=None)) is not None:
                    times.append(again - fault.start)
        return times

    def _running_on(self, fault: Happened) -> list[Run]:
        return [
            one
            for one in self._by_worker().get(fault.worker, ())
            if one.start <= fault.start and (one.end is None or one.end > fault.start)
        ]

    def _by_worker(self) -> dict[str, list[Run]]:
        if not hasattr(self, "_workers"):
            self._workers: dict[str, list[Run]] = defaultdict(list)
            for run in self.history.runs:
                self._workers[run.worker].append(run)
        return self._workers

    def _lateness(self) -> list[float]:
        return [
            self.runs[uuid][0].started_at - sent.eta
            for uuid, sent in self.history.sent.items()
            if sent.eta and uuid in self.runs
        ]

    def _violation(self, rule: str, uuid: str, text: str) -> Violation:
        return Violation(rule=rule, uuid=uuid, text=text, timeline=self._timeline(uuid))

    def _timeline(self, uuid: str) -> list[str]:
        """What is known of a task, in the order in which it happened."""
        events: list[tuple[float, str]] = []
        sent: Sent | None = self.history.sent.get(uuid)
        if sent is not None:
            events.append((sent.at, sent.word))
        for one in self.runs.get(uuid, ()):
            events.append(
                (
                    one.start,
                    f"start on {one.worker}, run {one.run}, fence {one.fence}, digest {one.digest}",
                )
            )
            if one.end is not None:
                events.append(
                    (one.end, f"end on {one.worker}, run {one.run}: {'ok' if one.ok else 'raised'}")
                )
            last = one.settled or one.start + ZOMBIE
            near = (
                fault
                for fault in (*self.repeated.faults[one.worker], *self.repeated.faults[""])
                if one.start - ZOMBIE <= fault.end and fault.start <= last
            )
            events += [
                (fault.start, f"{fault.kind} of {fault.worker or 'all'} until {fault.end:.3f}")
                for fault in near
            ]
        events += [
            (one.at, f"settled on {one.worker}, run {one.run}: {one.state}")
            for one in self.history.settled
            if one.uuid == uuid
        ]
        state = self.history.states.get(uuid)
        end = [
            f"in the end: {state.state} {state.results} {state.error}"
            if state
            else "in the end: no state"
        ]
        return [f"{at:.3f} {text}" for at, text in sorted(set(events))] + end


def shown(times: Sequence[float]) -> str:
    """Quantiles of seconds."""
    ordered = sorted(times)
    return (
        f"p50 {statistics.median(ordered):.3f} s, "
        f"p99 {ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]:.3f} s, "
        f"max {ordered[-1]:.3f} s (of {len(ordered)})"
    )
