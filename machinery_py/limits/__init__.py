"""Limits of a fleet: so many runs a second, so many at a time, so long between two."""

from machinery_py.limits.base import (
    Admission,
    Entrant,
    Limits,
    Rule,
    ScopeReport,
    Slot,
    UsageReport,
)

__all__ = ["Admission", "Entrant", "Limits", "Rule", "ScopeReport", "Slot", "UsageReport"]
