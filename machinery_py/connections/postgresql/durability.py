"""Warnings about a PostgreSQL: settings that can lose what it confirmed, and what makes it slow."""

from __future__ import annotations

import msgspec

from machinery_py.connections.durability import Concern

LONG = 600.0  # seconds of a transaction, which vacuum waits for
HALF = 0.5  # of the queue of notifications: full, it refuses commits

# Of transactions of other users a role without pg_monitor sees nothing.
FACTS = """
SELECT current_setting('fsync'), current_setting('full_page_writes'),
    current_setting('synchronous_commit'), pg_notification_queue_usage(),
    coalesce(extract(epoch FROM clock_timestamp() - least(
        (SELECT min(xact_start) FROM pg_stat_activity WHERE backend_xmin IS NOT NULL),
        (SELECT min(prepared) FROM pg_prepared_xacts))), 0)::float8
"""


class ServerFacts(msgspec.Struct):
    """Row of FACTS: settings, full share of the notifications, age of a transaction in seconds."""

    fsync: str
    full_page_writes: str
    synchronous_commit: str
    notifications: float
    oldest: float


def dangers(facts: ServerFacts) -> list[Concern]:
    """Return the settings by which something that was confirmed can be lost."""
    found = [
        Concern(f"{name} is off: a crash of its machine can damage it (turn it on)")
        for name in ("fsync", "full_page_writes")
        if getattr(facts, name) == "off"
    ]
    if facts.synchronous_commit == "off":
        text = "synchronous_commit is off: a crash loses what it confirmed in the last moments"
        found.append(Concern(f"{text} (set it for this role: ALTER ROLE … SET …)"))
    return found


def burdens(facts: ServerFacts, *, is_pooled: bool) -> list[Concern]:
    """Return what makes it slow."""
    found: list[Concern] = []
    if facts.oldest > LONG:
        text = (
            f"a transaction is open for {facts.oldest / 60:.0f} min: vacuum removes no ended task"
        )
        found.append(Concern(f"{text} (see pg_stat_activity and pg_prepared_xacts)"))
    if facts.notifications > HALF:
        text = f"its queue of notifications is {facts.notifications:.0%} full"
        found.append(Concern(f"{text}: a session that has used LISTEN is idle in a transaction"))
    if is_pooled:
        text = "a pooler is in between: nobody is notified, all look each 0.1 s (connect directly)"
        found.append(Concern(text, is_certain=False))
    return found
