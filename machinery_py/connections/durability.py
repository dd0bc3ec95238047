"""Warnings about server settings that can lose accepted messages or results."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Concern:
    """One reason why what was accepted could be lost.

    Attributes:
        text: what is, what it means, and what to change.
        is_certain: False: the server does not tell.
    """

    text: str
    is_certain: bool = True
