"""Headers by which tasks are related: who sent them, and who fails with whom."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from machinery_py.tasks.context import Context
from machinery_py.tasks.signature import (
    FIRST_RUN,
    HEADER_LAST,
    HEADER_ORIGIN,
    HEADER_PARENT,
    HEADER_ROOT,
    RunNumber,
    Signature,
)
from machinery_py.values.malformed import MALFORMED

TRACE_CONTEXT = frozenset({"traceparent", "tracestate", "baggage"})  # headers of the W3C
OURS = "machinery_"  # how the headers of tasks/signature.py begin


def inherited(
    signature: Signature[Any], task: Context, *, prefixes: str, parent: str = ""
) -> Mapping[str, Any]:
    """Return its headers with the trace context of the task, and with root, parent and origin.

    Its own headers win, and none of ours is copied. A retry of the task keeps root, parent and
    origin as they were.

    Args:
        prefixes: beginnings of further headers to be copied, separated by commas.
        parent: in place of the task.
    """
    found: dict[str, Any] = {}
    if task.signature.headers or task.handed_on:
        beginnings = tuple(filter(None, map(str.strip, prefixes.split(","))))
        found = {
            key: value
            for key, value in {**task.signature.headers, **task.handed_on}.items()
            if (key in TRACE_CONTEXT or (key.startswith(beginnings) and not key.startswith(OURS)))
            and isinstance(value, str)
        }
    if signature.uuid == task.uuid:  # its retry
        handed_on = task.handed_on.items()
        ours = {key: value for key, value in handed_on if key.startswith(OURS)}
        return {**found, **signature.headers, **ours}
    found[HEADER_ROOT] = task.signature.root or task.uuid
    found[HEADER_PARENT] = parent or task.uuid
    if task.worker:
        found[HEADER_ORIGIN] = task.worker
    return {**found, **signature.headers}


Last = tuple[str, RunNumber]
"""A task that fails with a step before it: its UUID, and the run that does."""

# As HEADER_RUN: no store can keep an integer without bounds.
_Run = Annotated[RunNumber, msgspec.Meta(ge=0, lt=10**9)]
_read_lasts = msgspec.json.Decoder(list[tuple[str, _Run]]).decode


def lasts_of(signature: Signature[Any]) -> list[Last]:
    """Return the tasks that fail with this one: the last of its chain, and what that stands for."""
    text = signature.headers.get(HEADER_LAST) if signature.headers else None
    if not isinstance(text, str) or not text:
        return []
    if not text.startswith("[["):
        return [(text, FIRST_RUN)]
    try:
        return _read_lasts(text)
    except MALFORMED:  # no sender of ours has written it
        return []


def last_header(last: Signature[Any]) -> str:
    """Return what the steps before the last one have in HEADER_LAST."""
    more = lasts_of(last)
    if not more and not last.run:
        return last.uuid
    return msgspec.json.encode([(last.uuid, last.run), *more]).decode()


def kin_of(signature: Signature[Any]) -> dict[str, str]:
    """Return the headers that say where it comes from, for those that it stands for."""
    kin = (HEADER_ROOT, HEADER_PARENT, HEADER_ORIGIN)
    return {key: signature.headers[key] for key in kin if key in signature.headers}
