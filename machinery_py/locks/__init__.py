"""Locks: one holder at a time, for as long as it says, across processes if the store is shared."""

from machinery_py.locks.base import Lock, LockHolding

__all__ = ["Lock", "LockHolding"]
