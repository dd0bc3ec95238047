"""Locks: one holder at a time, for as long as it says, across processes where the store is shared."""

from machinery_py.locks.base import Holding, Lock

__all__ = ["Holding", "Lock"]
