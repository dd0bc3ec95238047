"""Facts about processes, where a host does not tell them."""

from __future__ import annotations

import os

import pytest

from machinery_py.connections import proc


def _hidden() -> tuple[float, float, float]:
    raise OSError("Load averages are unobtainable")


def test_load_averages_may_be_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    assert proc.load() is not None
    monkeypatch.setattr(os, "getloadavg", _hidden)
    assert proc.load() is None
