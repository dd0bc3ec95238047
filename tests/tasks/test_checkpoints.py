"""What the headers of a task say of its checkpoints."""

from __future__ import annotations

import sys
import threading
import types

import pytest

from machinery_py.tasks.checkpoints import generation_of, kept_of, with_kept
from machinery_py.tasks.signature import HEADER_GENERATION, HEADER_KEPT, UNLIMITED, Signature
from machinery_py.transactions import _asyncio_task
from machinery_py.wire.signatures import encode_signature
from machinery_py.worker.running.checkpoints import _caller


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "9" * 5000, "٣", "1 2"])
def test_nonsense_for_a_generation_is_the_first_one(text: str) -> None:
    assert generation_of(Signature(name="f", headers={HEADER_GENERATION: text})) == 0


@pytest.mark.parametrize(
    "text", ["", "x", "1", "1 2", "1 2 3 4", "a b c", "1 " + "9" * 30 + " 0", "9" * 5000 + " 1 1"]
)
def test_nonsense_about_checkpoints_means_perhaps_some_and_stays_small(text: str) -> None:
    signature = Signature(name="f", headers={HEADER_KEPT: text})
    kept = kept_of(signature)

    assert kept is not None and max(kept) <= UNLIMITED
    encode_signature(with_kept(signature, kept.number, newly=True))


def test_asyncio_that_another_thread_imports_at_this_moment_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "asyncio", types.ModuleType("asyncio"))

    assert _caller() is threading.current_thread()
    assert _asyncio_task() is None
