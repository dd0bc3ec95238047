"""Tests of abilities on a store without them: check the refusal, and skip."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from machinery_py.backends.base import Backend, Rider
from machinery_py.errors import Unsupported


def need_revocations(backend: Backend) -> None:
    """Go on with a test of revocations, where they are kept."""
    if not backend.features.revocations:
        asks = (lambda: backend.revoke(["a"]), lambda: backend.revoked(["a"]))
        _skip(backend, "revocations", asks)


def need_claims(backend: Backend) -> None:
    """Go on with a test of claims, where they are kept."""
    if not backend.features.claims:
        rider = Rider(name="a", expected=None, body=b"1", life=100.0)
        asks = (
            lambda: backend.claims(["a"]),
            lambda: backend.release([("a", b"1")]),
            lambda: backend.amend(rider),
        )
        _skip(backend, "keys of unique tasks", asks)


def _skip(backend: Backend, what: str, asks: tuple[Callable[[], object], ...]) -> None:
    for ask in asks:
        with pytest.raises(Unsupported, match=f"keeps no {what} .put the results into "):
            ask()
    pytest.skip(f"{backend.features.name} keeps no {what}, and says so")
