"""`machinery migrate`: make the tables of the app's PostgreSQL, or bring them up to date."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from machinery_py.cli.output import answer, clean
from machinery_py.config.urls import redact

if TYPE_CHECKING:
    from machinery_py.server import Server


def migrate(server: Server, args: argparse.Namespace) -> int:
    """Run `machinery migrate`."""
    if args.sql:
        scripts = [one for family in server.app.stores.families if (one := family.migration())]
        return answer(args, {"sql": scripts}, "\n".join(scripts).rstrip("\n"))
    done: list[dict[str, object]] = []
    lines: list[str] = []
    for family in server.app.stores.families:
        before, now = family.migrate()
        if not now:
            continue  # it has no tables to migrate
        url = clean(redact(family.url))
        done.append({"store": url, "before": before, "now": now})
        change = f"from version {before} to {now}" if before else f"made, version {now}"
        lines.append(f"{url}: {change if before != now else f'up to date, version {now}'}")
    return answer(args, {"migrated": done}, "\n".join(lines) or "nothing to migrate")
