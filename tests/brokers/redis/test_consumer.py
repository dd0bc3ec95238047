"""What the file of a dead consumer says of the receipts of its queues."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from machinery_py.brokers.redis.consumer import KIND, began_by, series_of
from machinery_py.connections.session_files import host_file


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_receipts_of_a_dead_session_are_found_by_queue() -> None:
    file = host_file(KIND)
    for number, queue in ((1, "q"), (2**32 + 1, "q"), (2**53 - 1, "r"), (1, "r")):
        file.begins((number, series_of(queue)))

    q, r, s = began_by(file.key, ["q", "r", "s"], ["q", "r", "s"]) or ()

    assert sorted(q) == ["1", str(2**32 + 1)]
    assert sorted(r) == ["1", str(2**53 - 1)]
    assert s == []
    assert began_by(file.key, ["r"], ["q", "r"]) == [r]


def test_a_run_of_an_unknown_queue_makes_the_file_worth_nothing() -> None:
    file = host_file(KIND)
    file.begins((1, series_of("q")))
    file.begins((2, series_of("another")))

    assert began_by(file.key, ["q"], ["q", "r"]) is None
