"""The rules of mailboxes: which signal a run gets, and which wait ends."""

from __future__ import annotations

import datetime as dt

import msgspec
import pytest

from machinery_py import Config, Server, State, current_task
from machinery_py.bounds import CHECKPOINT_LIFE, MOST_SIGNALS, SIGNALS_BYTES
from machinery_py.clock import LONGEST, UTC
from machinery_py.errors import DecodeError, SignalRefused, SignalTimeout
from machinery_py.tasks.checkpoints import Checkpoint
from machinery_py.tasks.checkpoints import encode as encode_checkpoint
from machinery_py.tasks.mailboxes import (
    Mailbox,
    Wanted,
    brings_result,
    brought_to,
    decode,
    delivered,
    encode,
    life_of,
    of_next_generation,
    read_in,
    result_signal,
    signal_in,
    stands,
    timed_by,
    timer_of,
    unread_in,
    waiting,
    without_wait,
)
from machinery_py.tasks.signature import Arg, RunNumber, Signature
from machinery_py.tasks.states import SUSPENDED, TaskState
from machinery_py.testing.waiting import HANG

KEPT = encode_checkpoint(Checkpoint(results=b""))
NOW = dt.datetime(2026, 1, 2, tzinfo=UTC)


def wanted(name: str, *, until: dt.datetime | None = None, **read: int) -> Wanted:
    micros = 0 if until is None else int(until.timestamp() * 1e6)
    return Wanted(name=name, read=read, until=micros, waits=True)


def waits(box: Mailbox, one: Wanted) -> Mailbox:
    return waiting(box, one, body=b"message", run=RunNumber(3))


def full(*names: str) -> Mailbox:
    box = Mailbox()
    for place, name in enumerate(names):
        box, _ = delivered(box, name, b"%d" % place, str(place))
    return box


def value_in(box: Mailbox, one: Wanted) -> bytes | None:
    signal = signal_in(box, one)
    return None if signal is None else signal.results


def test_signals_of_a_name_have_an_order_of_their_own() -> None:
    box = decode(encode(full("a", "b", "a")))

    assert value_in(box, wanted("a", a=1)) == b"2"
    assert value_in(box, wanted("b")) == b"1"
    assert value_in(box, wanted("b", b=1)) is None


def test_only_the_signal_that_is_waited_for_ends_the_wait() -> None:
    waits_for_a = waits(full("b"), wanted("a"))

    box, ended = delivered(waits_for_a, "b", b"", "k")
    assert (ended, box.wait) == (None, waits_for_a.wait)
    box, ended = delivered(box, "a", b"", "l")
    assert (ended, box.wait) == (waits_for_a.wait, None)


def test_what_was_read_is_forgotten_with_the_next_wait() -> None:
    box = waits(full("a", "a", "b"), wanted("a", a=2))

    assert [(one.name, one.number) for one in box.sent] == [("b", 1)]
    box, _ = delivered(box, "a", b"third", "k")
    assert value_in(box, wanted("a", a=2)) == b"third"


def test_record_that_was_lost_counts_what_was_read() -> None:
    box, _ = delivered(decode(None, {"a": 2}), "a", b"third", "k")

    assert value_in(box, wanted("a", a=2)) == b"third"


def test_what_was_read_by_all_checkpoints_is_left_out() -> None:
    rows = {"1:wait for a": KEPT, "1:wait for a#2": KEPT}
    box = full("a", "a", "a")

    assert [one.number for one in unread_in(box, {}).sent] == [1, 2, 3]
    assert [one.number for one in unread_in(box, rows).sent] == [3]
    later = msgspec.structs.replace(box, generation=2)
    assert unread_in(later, rows) == later


def test_next_generation_numbers_what_is_unread() -> None:
    box = of_next_generation(full("a", "a", "b"), {"a": 1}, 1)

    assert (value_in(box, wanted("a")), value_in(box, wanted("b"))) == (b"1", b"2")
    box, _ = delivered(box, "a", b"new", "k")
    assert value_in(box, wanted("a", a=1)) == b"new"
    assert box.generation == 1


def test_results_of_an_earlier_generation_are_dropped() -> None:
    box = full("a", result_signal(0, "result of render"))

    assert [one.name for one in of_next_generation(box, {}, 1).sent] == ["a"]


def test_result_that_came_too_late_is_forgotten_with_the_next_wait() -> None:
    rows = {"result of render": Checkpoint(failed=True), "wait for a": Checkpoint()}
    read = read_in(rows, 3)
    assert read == {"#3 result of render": 1, "a": 1}
    box = waits(full("#3 result of render", "#3 result of other"), wanted("b", **read))
    assert [one.name for one in box.sent] == ["#3 result of other"]


@pytest.mark.parametrize("uuid", ["", "a\x00b", "x" * 300, "machinery_tasks"])
def test_message_that_wakes_no_task_is_none_of_ours(uuid: str) -> None:
    success, failure = brings_result(uuid, "#0 result of render", "queue")
    assert brought_to(success) == ("", "")
    assert brought_to(failure.with_args(before=[Arg(type="string", value="text")])) == ("", "")


def test_signal_that_ends_a_wait_has_room() -> None:
    box = waits(full(*("a" for _ in range(MOST_SIGNALS))), wanted("b"))
    box, ended = delivered(box, "b", b"", "k")
    assert ended is not None
    assert value_in(box, wanted("b")) == b""


def test_mailbox_is_bounded() -> None:
    box = full(*("a" for _ in range(MOST_SIGNALS)))
    assert len(box.keys) == MOST_SIGNALS
    with pytest.raises(SignalRefused, match="1,000 unread signals"):
        delivered(box, "b", b"", "k")
    with pytest.raises(SignalRefused, match="bytes"):
        delivered(Mailbox(), "b", bytes(SIGNALS_BYTES + 1), "k")


@pytest.mark.parametrize(
    ("state", "run", "error_type", "expected"),
    [
        (State.RETRY, 2, SUSPENDED, True),
        (State.RETRY, 2, "OSError", False),  # another run has failed
        (State.RETRY, 3, SUSPENDED, False),  # a later one sleeps
        (State.STARTED, 2, "", False),
        (State.FAILURE, 2, "Revoked", False),
    ],
)
def test_wait_stands_while_the_state_says_so(
    state: State, run: int, error_type: str, expected: bool
) -> None:
    wait = waits(Mailbox(), wanted("a")).wait
    assert wait is not None
    found = TaskState(task_uuid="t", state=state, run=RunNumber(run), error_type=error_type)

    assert stands(wait, found) is expected
    assert stands(wait, None)  # it has expired


def test_record_lives_longer_than_its_wait() -> None:
    week = dt.timedelta(days=7)

    assert life_of(Mailbox(), NOW) == CHECKPOINT_LIFE
    assert life_of(waits(Mailbox(), wanted("a")), NOW) == LONGEST
    box = waits(Mailbox(), wanted("a", until=NOW + week))
    assert life_of(box, NOW) == CHECKPOINT_LIFE + week.total_seconds()
    assert life_of(box, NOW + 2 * week) == CHECKPOINT_LIFE
    assert life_of(without_wait(box), NOW) == CHECKPOINT_LIFE


def test_timer_says_whose_it_is() -> None:
    wait = waits(Mailbox(), wanted("a", until=NOW)).wait
    assert wait is not None
    timer = timer_of("task_1", wait, "mail")

    assert (timer.uuid, timer.eta, timer.routing_key) == (wait.id, NOW, "mail")
    assert timed_by(timer) == "task_1"


@pytest.mark.parametrize("args", [[], [Arg(type="int64", value=7)], [Arg(type="", value=None)]])
def test_timer_of_nobody_is_of_none(args: list[Arg]) -> None:
    assert timed_by(Signature(name="machinery.timer", args=args)) == ""


@pytest.mark.parametrize("body", [b"", b"x", b"\x81\xa4sent\x07"])
def test_nonsense_for_a_mailbox_is_an_error(body: bytes) -> None:
    with pytest.raises(DecodeError, match="no mailbox"):
        decode(body)


def test_field_of_a_newer_version_is_left_out() -> None:
    newer = msgspec.msgpack.encode({"counts": {"a": 1}, "later": 7})
    assert decode(newer) == Mailbox(counts={"a": 1})


def test_where_no_time_passes_a_wait_with_a_timeout_is_over() -> None:
    server = Server(Config(broker="eager://"))

    @server.task
    def flow() -> list[str]:
        task = current_task()
        task.sleep(dt.timedelta(days=3))
        try:
            task.wait_for("approval", timeout=60)
        except SignalTimeout as error:
            return [str(error), task.wait_for("approval")]
        return []

    result = flow.send()
    assert result.get_state().error == "waits for signal 'approval'"
    server.signal(result.uuid, "approval", "yes")
    assert result.get(timeout=HANG) == ["signal 'approval' did not come in time", "yes"]
    server.close()
