"""What chains, groups, chords and callbacks can be made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from machinery_py import Server, Task, WorkflowError, chain, chord, group
from machinery_py.testing import Harness


class Flow:
    """A task that adds, and one that notes what it gets."""

    def __init__(self) -> None:
        self.server = Server("memory://")
        self.noted: list[tuple[Any, ...]] = []
        self.add: Task[..., int] = self.server.register_task("add", lambda *numbers: sum(numbers))
        self.note: Task[..., None] = self.server.register_task(
            "note", lambda *args: self.noted.append(args)
        )
        self.fail: Task[..., None] = self.server.register_task("fail", _fail)

    def run(self, step: Any) -> list[tuple[Any, ...]]:
        """What is noted when this is sent."""
        self.noted.clear()
        with Harness(self.server) as harness:
            self.server.send(step)
            harness.drain(raise_failures=False)
        return sorted(self.noted, key=repr)


@pytest.fixture
def flow() -> Iterator[Flow]:
    flow = Flow()
    yield flow
    flow.server.close()


def test_callbacks_may_be_chains_groups_and_lists(flow: Flow) -> None:
    add, note, first = flow.add, flow.note, flow.add.signature(1)

    assert flow.run(first.then(chain(add.partial(1), add.partial(1), note.partial("end")))) == [
        ("end", 3)
    ]
    assert flow.run(first.then(group(note.partial("a"), note.partial("b")))) == [("a", 1), ("b", 1)]
    assert flow.run(first.then([note.partial("a"), add.partial(4) | note.partial("b")])) == [
        ("a", 1),
        ("b", 5),
    ]
    assert flow.run(
        first.then(
            chain(add.partial(1), group(note.partial("a"), add.partial(1) | note.partial("b")))
        )
    ) == [("a", 2), ("b", 3)]
    assert flow.run(flow.fail.signature().catch(note.partial("a") | note.partial("b"))) == [
        ("b",),
        ("broken", "a"),
    ]
    assert flow.run(first.then(add.partial().then(note.partial("kept")) | note.partial("end"))) == [
        ("end", 1),
        ("kept", 1),
    ]


def test_callback_may_wait_for_a_group(flow: Flow) -> None:
    add, note = flow.add, flow.note
    waits = chain(group(add.partial(1), add.partial(2)), note.partial("end"))

    assert flow.run(add.signature(1).then(waits)) == [("end", 2, 3)]
    assert flow.run(add.signature(1).then(add.partial(1).then(waits, waits))) == [
        ("end", 3, 4),
        ("end", 3, 4),
    ]


def test_a_chord_takes_a_list_and_a_chain(flow: Flow) -> None:
    add, note, total = flow.add, flow.note, flow.server.register_task("total", sum)
    members = [add.signature(1), add.signature(2)]

    assert flow.run(chord(members, note.partial("end"))) == [("end", 1, 2)]
    assert flow.run(chord((add.signature(number) for number in range(3)), note.partial())) == [
        (0, 1, 2)
    ]
    assert flow.run(chord(group(members), chain(add.partial(4), note.partial("end")))) == [
        ("end", 7)
    ]
    assert flow.run(
        chord(group(members), chain(total.partial(), note.partial("end")), collect=True)
    ) == [("end", 3)]
    assert flow.run(chord(members, total.partial(), collect=True) | note.partial("end")) == [
        ("end", 3)
    ]


def test_value_that_cannot_be_a_step_is_refused_in_words(flow: Flow) -> None:
    add, one = flow.add, flow.add.signature(1)
    for made in (
        lambda: chain(one, add),
        lambda: group(one, add),
        lambda: group([add]),
        lambda: chord(one, add),
        lambda: chord([one], add),
        lambda: chord([add], one),
        lambda: one.then(add),
        lambda: one | add,
        lambda: chord([one], add, collect=True),
    ):
        with pytest.raises(
            WorkflowError, match=r"of a task: add\.signature\(…\)|cannot be the members of a chord"
        ):
            made()  # type: ignore[no-untyped-call]
    for made in (
        lambda: chain(one, 5),
        lambda: group("add"),
        lambda: one.then(None),
        lambda: chord(one | one, one),
    ):  # type: ignore[arg-type]
        with pytest.raises(WorkflowError, match="expected a"):
            made()  # type: ignore[no-untyped-call]


def _fail() -> None:
    raise ValueError("broken")
