"""Receipts: how a store knows which handing-over of a message somebody speaks of."""

from __future__ import annotations


class Receipt:
    """The name of one handing-over, which means something to the store alone.

    Each store has a class of its own, whose values it makes where it claims. They are hashable, and
    their text names the handing-over among all of the store. Of another store's, and of NO_RECEIPT,
    a store finds nothing.
    """

    __slots__ = ()


NO_RECEIPT = Receipt()  # of a task that runs without a message of its own
