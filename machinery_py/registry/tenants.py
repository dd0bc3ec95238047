"""Tenants of fair queues: whose turn a task takes."""

from __future__ import annotations

from typing import Any

import msgspec

from machinery_py.registry.calls import Call
from machinery_py.tasks.signature import Signature

_encode = msgspec.json.Encoder(order="sorted").encode


def tenant_of(signature: Signature[Any], call: Call | None, field: str) -> str:
    """Return the value of this parameter, else of the header of this name; "" if it has neither.

    Args:
        call: of the task; None: it is not known here, and neither are its parameters.
    """
    value: object = signature.headers.get(field, "")
    if call is not None and field in call.names:
        placed, named = call.sorted_out(signature.args)
        given = dict(zip(call.places, placed, strict=False)) | named
        value = given[field].value if field in given else ""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    return _encode(value).decode()
