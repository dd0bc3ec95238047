"""Checkpoints of a task as they are stored, and what its next message says of them.

A checkpoint is the end of one step: what its function returned, or that it raised. Its name is that
of the step, with `#2` behind it for the second one of a name, and the generation of the task in
front: docs/explanation/durable-functions.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from machinery_py.errors import DecodeError
from machinery_py.tasks.signature import (
    HEADER_EXPIRES,
    HEADER_GENERATION,
    HEADER_KEPT,
    HEADER_LOST,
    HEADER_LOST_HOW,
    UNLIMITED,
    AttemptNumber,
    RunNumber,
    Signature,
)
from machinery_py.values.json_values import pack
from machinery_py.values.malformed import MALFORMED


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """The end of a step.

    Attributes:
        results: of the function, as a state has them.
        digest: of its arguments.
        failed: it raised `error`, of `error_type`, and the task went on.
        at: when it was kept; µs since 1970 by the clock of the worker.
        run: of the task, in which it was kept; `strikes`: that the delivery had then.
    """

    results: bytes = b""
    digest: str = ""
    failed: bool = False
    error: str = ""
    error_type: str = ""
    at: int = 0
    run: RunNumber = RunNumber(0)
    strikes: int = 0


MOST_DIGITS = 12  # of a number in a header

encode: Final = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Checkpoint).decode
_canonical = msgspec.json.Encoder(order="deterministic").encode


def decode(body: bytes) -> Checkpoint:
    """Return a stored checkpoint.

    Raises:
        DecodeError: it is none.
    """
    try:
        return _decode(body)
    except MALFORMED as error:
        raise DecodeError(f"no checkpoint: {error}") from None


def generation_of(signature: Signature[Any]) -> int:
    """Return how often the task was sent again from its start."""
    text = signature.headers.get(HEADER_GENERATION) if signature.headers else None
    return _number(text) if isinstance(text, str) else 0


def next_generation(signature: Signature[Any]) -> str:
    """Return what its header says of a task whose steps are all made again, with other keys."""
    return str(generation_of(signature) + 1)


def _number(text: str) -> int:
    """Return a number of a header; 0 if nobody of ours has written it."""
    is_ours = text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS
    return min(int(text), UNLIMITED) if is_ours else 0


def stored_name(generation: int, step: str) -> str:
    return f"{generation}:{step}"


def of_generation(rows: Mapping[str, bytes], generation: int) -> dict[str, Checkpoint]:
    """Return the checkpoints of a generation by the names of their steps, in the order of time."""
    before = stored_name(generation, "")
    found = [
        (name.removeprefix(before), decode(body))
        for name, body in rows.items()
        if name.startswith(before)
    ]
    return dict(sorted(found, key=lambda pair: pair[1].at))


def last_generation(rows: Iterable[str]) -> int:
    """Return the greatest generation of these names; 0 without any."""
    return max((_number(name.partition(":")[0]) for name in rows), default=0)


def newest_generation(rows: Mapping[str, bytes]) -> dict[str, Checkpoint]:
    """Return the checkpoints of the last generation that has any, as `of_generation`."""
    return of_generation(rows, last_generation(rows))


def before_generation(rows: Iterable[str], generation: int) -> list[str]:
    """Return the names of those checkpoints that are of an earlier generation."""
    return [name for name in rows if _number(name.partition(":")[0]) < generation]


def digest_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return a digest of a call's arguments; what could not be sent counts by its type alone."""
    placed = [_packed(value) for value in args]
    named = {name: _packed(kwargs[name]) for name in sorted(kwargs)}
    return hashlib.sha256(_canonical([placed, named])).hexdigest()[:16]


def _packed(value: Any) -> Any:
    try:
        return _sorted_sets(pack(value, 1, tags=True))
    except Exception:  # user code: the step may still be made
        return {"?": type(value).__qualname__}


def _sorted_sets(packed: Any) -> Any:
    """Return it with the items of each set in one order, which differs between processes."""
    if isinstance(packed, dict):
        items = {key: _sorted_sets(value) for key, value in packed.items()}
        for kind in "set", "frozenset":
            if items.get("$") == kind:
                return {key: _in_order(value) for key, value in items.items()}
        return items
    return [_sorted_sets(item) for item in packed] if isinstance(packed, list) else packed


def _in_order(value: Any) -> Any:
    return sorted(value, key=_canonical) if isinstance(value, list) else value


# What the message of the next run says


class KeptHeader(NamedTuple):
    """Content of a header: checkpoints of earlier runs.

    Attributes:
        number: how many there are, at least; 0: perhaps there are some.
        tries: that the task had after its first one, in all; 0: never counted.
        base: how many tries ended before the first one that counts since the last checkpoint.
    """

    number: int
    tries: int = 0
    base: int = 0


def kept_of(signature: Signature[Any]) -> KeptHeader | None:
    """Return what its header says; None: no run has kept a checkpoint."""
    text = signature.headers.get(HEADER_KEPT) if signature.headers else None
    if not isinstance(text, str):
        return None
    words = text[: 3 * MOST_DIGITS].split(" ")
    return KeptHeader(*map(_number, words)) if len(words) == 3 else KeptHeader(0)


def tried(signature: Signature[Any]) -> AttemptNumber:
    """Return which try this is since the task has last kept a checkpoint: 1 for the first."""
    kept = kept_of(signature) if signature.headers else None
    base = 0 if kept is None else kept.base
    return AttemptNumber(max(1, signature.attempt - base))


def all_tries(signature: Signature[Any]) -> int:
    """Return how many tries the task has after its first one."""
    kept = kept_of(signature)
    if kept is not None and kept.tries:
        return kept.tries
    return min(UNLIMITED, signature.retry_count + signature.attempt - 1)


def with_kept(signature: Signature[Any], number: int, *, newly: bool) -> Signature[Any]:
    """Return the task with what its next run, or whoever sends it again, must know.

    Args:
        number: of checkpoints; 0: perhaps there are some.
        newly: this run has kept one: tries and strikes begin anew, and it has no expiry any more.
    """
    tries, kept = all_tries(signature), kept_of(signature)
    base = signature.attempt - 1 if newly else kept.base if kept is not None else 0
    headers = {**signature.headers, HEADER_KEPT: f"{number} {tries} {base}"}
    if not newly:
        return signature.replace(headers=headers)
    for name in HEADER_LOST, HEADER_LOST_HOW, HEADER_EXPIRES:
        headers.pop(name, None)
    return signature.replace(headers=headers, retry_count=tries, retry_timeout=0)


def uncounted(signature: Signature[Any]) -> Signature[Any]:
    """Return a task that begins with its first try again, behind its checkpoints."""
    if (kept := kept_of(signature)) is None:
        return signature
    return signature.with_headers(**{HEADER_KEPT: f"{kept.number} {kept.tries} 0"})


def from_its_start(signature: Signature[Any]) -> Signature[Any]:
    """Return a task that makes all its steps again, with other keys."""
    headers = {key: value for key, value in signature.headers.items() if key != HEADER_KEPT}
    headers[HEADER_GENERATION] = next_generation(signature)
    return signature.replace(headers=headers)
