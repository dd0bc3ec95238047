"""Workflows that are kept before they are sent: by schedules, and by a task that is replaced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from machinery_py.errors import DecodeError, WorkflowError
from machinery_py.tasks.linking import is_linked
from machinery_py.tasks.signature import Chain, Signature, Step
from machinery_py.tasks.workflow import Group, OnFailure
from machinery_py.values.malformed import MALFORMED
from machinery_py.wire.signatures import decode_signature, encode_signature


def pack_step(step: Step[Any]) -> msgspec.Raw:
    """Encode the step without UUIDs: each run has its own. (In Go a given UUID stays the same.)

    Raises:
        ArgumentError: something in it cannot be sent.
        WorkflowError: it is no signature, chain or group.
    """
    return msgspec.Raw(msgspec.json.encode(_packed(step)))


class _Packed(msgspec.Struct, omit_defaults=True):
    """A step. `then` and `catch` hold callbacks that are not linked, or those of a group."""

    task: msgspec.Raw = msgspec.Raw()
    group: list[msgspec.Raw] | None = None
    chain: list[msgspec.Raw] | None = None
    then: list[msgspec.Raw] = []
    catch: list[msgspec.Raw] = []
    on_failure: OnFailure = "abort"


_decode_packed = msgspec.json.Decoder(_Packed).decode


def _packed(step: Step[Any]) -> _Packed:
    if isinstance(step, Signature):
        step = step.replace(uuid="", group_uuid="", sender=None)
        if is_linked((step,)):
            return _Packed(task=msgspec.Raw(encode_signature(step)))
        bare = step.replace(on_success=(), on_error=())
        return _Packed(
            task=msgspec.Raw(encode_signature(bare)),
            then=_all(step.on_success),
            catch=_all(step.on_error),
        )
    if isinstance(step, Group):
        return _Packed(
            group=_all(step.steps),
            then=_all(step.on_success),
            catch=_all(step.on_error),
            on_failure=step.on_failure,
        )
    return _Packed(chain=_all(_inner(step)))


def _all(steps: Sequence[Step[Any]]) -> list[msgspec.Raw]:
    return [pack_step(one) for one in steps]


def _inner(step: Step[Any]) -> Sequence[Step[Any]]:
    if not isinstance(step, Group | Chain):
        raise WorkflowError(
            f"{step!r} cannot be sent (expected a signature, chain, group or chord)"
        )
    return step.steps


def unpack_step(body: msgspec.Raw | bytes) -> Step[Any]:
    """Read what `pack_step` wrote.

    Raises:
        DecodeError: it is something else.
    """
    try:
        packed = _decode_packed(body)
    except MALFORMED as error:
        raise DecodeError(f"a stored workflow cannot be read: {error}") from error
    then, catch = [[unpack_step(one) for one in found] for found in (packed.then, packed.catch)]
    if task := bytes(packed.task):
        signature = decode_signature(task)
        if not then and not catch:
            return signature
        return signature.then(*then).catch(*catch)
    if packed.group is not None:
        members = [unpack_step(one) for one in packed.group]
        return Group(members, on_failure=packed.on_failure, on_success=then, on_error=catch)
    return Chain([unpack_step(one) for one in packed.chain or ()])


def task_names(step: Step[Any]) -> list[str]:
    """Return the names of all tasks in it, in order, without those of callbacks."""
    if isinstance(step, Signature):
        return [step.name]
    return [name for one in _inner(step) for name in task_names(one)]
