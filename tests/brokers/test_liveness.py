"""When a consumer is declared dead because its heartbeat stopped."""

from __future__ import annotations

import os

import pytest

from machinery_py.brokers.liveness import (
    STALE_LOOK,
    HeartbeatJudge,
    log_loss,
    own_record,
    read_record,
)
from machinery_py.testing.clocks import ManualClock

LEASE = 10.0


def judge() -> HeartbeatJudge[str]:
    return HeartbeatJudge(patience=LEASE / 2, lease=LEASE)


def test_session_whose_heartbeat_stays_the_same_is_dead_after_patience() -> None:
    watched = judge()

    assert watched.dead({"s": 1}, 0.0) == []
    assert watched.dead({"s": 1}, 4.9) == []
    assert watched.dead({"s": 1}, 5.0) == ["s"]
    assert not watched


def test_heartbeat_that_changes_starts_the_wait_anew() -> None:
    watched = judge()

    for moment in range(20):
        assert watched.dead({"s": moment // 2}, 4.0 * moment) == []


def test_look_after_a_long_pause_declares_nobody_dead() -> None:
    watched = judge()
    watched.dead({"s": 1}, 0.0)

    late = STALE_LOOK * LEASE + 0.1

    assert watched.dead({"s": 1}, late) == []
    assert watched.dead({"s": 1}, late + 5.0) == ["s"]


def test_session_that_is_not_listed_any_more_is_forgotten() -> None:
    watched = judge()
    watched.dead({"s": 1, "t": 1}, 0.0)
    watched.dead({"t": 2}, 4.0)

    assert watched.dead({"s": 1, "t": 2}, 6.0) == []


@pytest.mark.parametrize(
    ("ended", "text"),
    [(True, "is gone, its process has ended"), (False, "has lost its lease")],
)
def test_log_says_how_a_worker_was_lost(
    ended: bool, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    info = read_record(own_record("ada", ["q"], ManualClock()))

    log_loss(info, has_ended=ended)

    assert f"{text}: what it held goes back to its queues" in caplog.text
    assert f"worker ada (pid {os.getpid()} on " in caplog.text
