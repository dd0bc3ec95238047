"""Limits of a fleet: so many runs a second, so many at a time, so long between two."""

from machinery_py.limits.base import Admission, Limits, Rule, ScopeReport, Slot, UsageReport

__all__ = ["Admission", "Limits", "Rule", "ScopeReport", "Slot", "UsageReport"]
