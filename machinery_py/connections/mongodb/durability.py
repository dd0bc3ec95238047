"""Warnings about settings of a MongoDB that can lose what it has stored. Pure.

Judged are its role, the write concern, storage and journal, from the server's own replies. Every
user may ask `isMaster` and `buildInfo`. `serverStatus` and `getCmdLineOpts` need the role
clusterMonitor: what cannot be known is reported as unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from machinery_py.connections.durability import Concern

ALWAYS_JOURNALS = (6, 1)  # from here on no mongod can be started without a journal

Facts = Mapping[str, Any]


class Told(NamedTuple):
    """Replies of a server, and how writes are confirmed."""

    hello: Facts  # the reply of isMaster
    build: Facts  # of buildInfo; empty if it does not tell
    status: Facts | None  # of serverStatus; None if it does not tell
    options: Facts | None  # of getCmdLineOpts; None if it does not tell
    concern: Facts  # the client's write concern: w, j


def version_of(build: Facts) -> tuple[int, int] | None:
    """Return major and minor number, if it tells."""
    numbers = str(build.get("version", "")).split(".")
    if len(numbers) < 2 or not (numbers[0].isdecimal() and numbers[1].isdecimal()):
        return None
    return int(numbers[0]), int(numbers[1])


def concerns(told: Told) -> list[Concern]:
    """Return what is wrong or unknown, the worst first."""
    is_router = told.hello.get("msg") == "isdbgrid"
    found = [*_role(told.hello), *_confirmation(told, is_router=is_router)]
    # A router stores nothing, and does not tell of its shards.
    return found if is_router else [*found, *_storage(told)]


def _role(hello: Facts) -> Iterator[Concern]:
    name = hello.get("setName")
    if name is not None and not hello.get("isWritablePrimary", hello.get("ismaster")):
        primary = hello.get("primary")
        whose = f", whose primary is {primary}" if primary else ""
        yield Concern(
            f"it is a secondary of the replica set {name}{whose}: no task can be stored or taken "
            f"here (name all members in the URL, and replicaSet={name})"
        )


def _confirmation(told: Told, *, is_router: bool) -> Iterator[Concern]:
    wanted = told.concern.get("w", 1)
    has_members = told.hello.get("setName") is not None or is_router
    majority = max(1, len(told.hello.get("hosts") or ()) // 2)
    if has_members and isinstance(wanted, int) and wanted <= majority:
        yield Concern(
            f"w={wanted} in its URL waits for no majority: what the others do not have yet is lost "
            "when the primary steps down (leave w out, or set w=majority)"
        )
    if told.concern.get("j") is False:
        yield Concern(
            "journal=false in its URL confirms what is in no journal yet: a crash loses it "
            "(leave journal out)"
        )


def _storage(told: Told) -> Iterator[Concern]:
    engine = (told.status or {}).get("storageEngine") or {}
    version = version_of(told.build)
    if "persistent" not in engine:
        yield Concern(
            "it does not tell whether it keeps what it stores (give this user the role "
            "clusterMonitor)",
            is_certain=False,
        )
    elif not engine["persistent"]:
        yield Concern(
            f"its storage engine is {engine.get('name', '?')}: a restart loses everything "
            "(set storage.engine wiredTiger)"
        )
    elif version is not None and version >= ALWAYS_JOURNALS:
        return
    elif told.options is None:
        yield Concern(
            "it does not tell whether it has a journal (give this user the role clusterMonitor)",
            is_certain=False,
        )
    else:
        storage = (told.options.get("parsed") or {}).get("storage") or {}
        if not (storage.get("journal") or {}).get("enabled", True):
            yield Concern(
                "it has no journal: a crash loses what came in the last minute "
                "(set storage.journal.enabled true)"
            )
