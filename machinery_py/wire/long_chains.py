"""Chains that are longer than Go reads: sent in pieces.

The first piece is a message. Each later one is a record in the result backend, a group whose plan
is a list of signatures; the last task of the piece before names it in a header, and its worker
reads it. So the bytes of all steps grow with their number, not with its square.
"""

from __future__ import annotations

import datetime as dt
from typing import Any

import msgspec

from machinery_py.errors import Unsupported
from machinery_py.tasks.linking import LONG, Plan, link
from machinery_py.tasks.signature import HEADER_REST, Signature, Step
from machinery_py.tasks.states import GroupMeta
from machinery_py.wire.decode import decode_list
from machinery_py.wire.signatures import encode_signature


def link_any(step: Step[Any], *, now: dt.datetime, are_kept: bool, queue: str = "") -> Plan:
    """Link a workflow of any length for sending.

    Args:
        are_kept: the result backend keeps records.
        queue: as of `link`.

    Raises:
        Unsupported: it does not, and the workflow is too long for a message.
    """
    plan = link(step, now=now, may_cut=True, queue=queue)
    if not plan.rests:
        return plan
    if not are_kept:
        raise Unsupported(
            f"a chain of more than {LONG} steps needs a result backend, which keeps the later ones"
        )
    records = [
        GroupMeta(
            group_uuid=one.uuid,
            task_uuids=one.tasks,
            created_at=now,
            plan=(b"[" + b",".join(map(encode_signature, one.steps)) + b"]").decode(),
        )
        for one in plan.rests
    ]
    return msgspec.structs.replace(plan, groups=(*records, *plan.groups))


def with_rest(signature: Signature[Any], record: GroupMeta) -> Signature[Any]:
    """Return a task that names this record, with the steps behind it.

    Raises:
        DecodeError: the record holds none.
    """
    headers = {key: value for key, value in signature.headers.items() if key != HEADER_REST}
    return signature.replace(headers=headers, on_success=decode_list(record.plan.encode()))
