"""Warnings about server settings that can lose accepted messages or results."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Concern:
    """One reason why accepted messages or results could be lost.

    Attributes:
        text: the setting, what it means, and what to change.
        is_certain: False if the server does not tell the setting.
    """

    text: str
    is_certain: bool = True
