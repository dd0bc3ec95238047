"""What becomes of a message that cannot be decoded: for want of memory, or at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from machinery_py import Server
from machinery_py.brokers.rows import RowsBroker
from machinery_py.rows.messages import MessageStep, Push
from machinery_py.tasks.signature import Signature
from machinery_py.testing.clocks import ManualClock
from machinery_py.wire.signatures import decode_signature
from machinery_py.worker.admission import intake
from machinery_py.worker.inline import Inline


@pytest.fixture
def server(clock: ManualClock) -> Server:
    return Server("memory://", clock=clock)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def fail_times(count: int) -> Callable[[bytes], Signature]:
    """Return a decoder that has no memory so many times."""
    left = iter(range(count))

    def decode(body: bytes) -> Signature:
        if next(left, None) is not None:
            raise MemoryError
        return decode_signature(body)

    return decode


def test_message_waits_longer_each_time_for_memory_to_decode_it(
    server: Server, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, inline = server.task("size")(len).send("four"), Inline(server.app)
    monkeypatch.setattr(intake, "decode_signature", fail_times(3))

    for pause in (1.0, 2.0, 4.0):
        inline.drain()
        assert not result.is_finished()
        clock.advance(pause)
        server.app.store.tend()
    inline.drain()

    assert result.get(timeout=0) == 4


def test_message_that_no_memory_suffices_for_is_a_dead_letter(
    server: Server, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.task("size")(len).send("four")
    inline = Inline(server.app)
    monkeypatch.setattr(intake, "decode_signature", fail_times(1000))

    for _ in range(11):
        inline.drain()
        clock.advance(60.0)
        server.app.store.tend()

    (dead,) = server.inspect.dead()
    assert dead.reason == "undecodable"
    assert "no memory to decode" in dead.error


def test_bytes_that_are_no_message_of_ours_are_a_dead_letter(server: Server) -> None:
    """As a role may write them that sends, and no more."""
    result, inline = server.task("size")(len).send("four"), Inline(server.app)
    broker = server.broker
    assert isinstance(broker, RowsBroker)
    odd = Push(queue="machinery_tasks", body=b"\xc1 no msgpack", priority=9)
    broker.rows.commit([MessageStep(pushes=(odd,))])
    assert odd.body in [one.body for one in broker.pending("machinery_tasks", 2)]

    inline.drain()

    assert result.get(timeout=0) == 4
    (dead,) = server.inspect.dead()
    assert (dead.body, dead.reason) == (odd.body, "undecodable")
