"""Keys of unique and limited tasks, names of exclusive locks; see docs/explanation/unique.md."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from machinery_py.config.config import OPTIONS, Config
from machinery_py.errors import ArgumentError
from machinery_py.registry.calls import Call
from machinery_py.tasks.signature import Arg
from machinery_py.tasks.states import State, TaskState
from machinery_py.values.malformed import MALFORMED

# Seconds that a key without a window is held: as long as the state of a task that is not finished.
LONGEST = 7 * 86400.0
# Seconds that a claim is kept longer than it says, since readers judge it by their own clocks.
MARGIN = 60.0

_encode = msgspec.json.Encoder(order="sorted").encode


class KeyClaim(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The record of a key: the task that holds it, and until when.

    Attributes:
        token: of the sending that took it, so that its repeat after a lost reply is known.
        until: unix seconds; then the key is free in any case. 0: when the task is over.
        expires: unix seconds; after that the task is not started any more. 0: never.
        replaceable: a later call can take its place until the worker has set `started`.
    """

    uuid: str
    token: str = ""
    until: float = 0.0
    expires: float = 0.0
    replaceable: bool = False
    started: bool = False

    def stands(self, state: TaskState | None, now: dt.datetime) -> bool:
        """Return whether it keeps others away, with its task in this state."""
        moment = now.timestamp()
        if state is None or state.is_finished or 0.0 < self.until <= moment:
            return False
        # Nobody will run it any more; that it failed is not known before a worker has seen it.
        return not (0.0 < self.expires <= moment - MARGIN and state.state is State.PENDING)

    def life(self, now: dt.datetime, eta: dt.datetime | None) -> float:
        """Return the seconds that a store keeps it."""
        moment = now.timestamp()
        if self.until:
            return max(1.0, self.until - moment) + MARGIN
        return math.ceil(
            LONGEST + MARGIN + max(0.0, (eta.timestamp() - moment) if eta is not None else 0.0)
        )


encode_claim: Final = msgspec.json.Encoder().encode
_decode_claim = msgspec.json.Decoder(KeyClaim).decode


def decode_claim(body: bytes) -> KeyClaim | None:
    """Return the claim in a record; None if it is none, and the key is free."""
    try:
        return _decode_claim(body)
    except MALFORMED:
        return None


def owner(config: Config) -> str:
    """Return the mark of this application's keys in shared stores; "" for the default queue's."""
    application = config.application or config.default_queue
    return "" if application == OPTIONS["default_queue"].default else application


def unique_key(
    name: str,
    call: Call | None,
    args: Sequence[Arg],
    how: bool | str | Callable[..., str],
    *,
    owner: str = "",
) -> str:
    """Return the key of a call, hashed: calls with one key are the same.

    Args:
        call: of the task; None: it is not known here, and nothing is known of defaults.
        how: True for the arguments, or a key as `key_text` takes it.

    Raises:
        ArgumentError: the function does not return a text, or the arguments do not fit it.
    """
    if how is True:
        return _digest(owner, name, *_canonical(call, args))
    return _digest(owner, name, key_text(name, call, args, how, "unique"))


def lock_name(
    name: str, call: Call, args: Sequence[Arg], how: str | Callable[..., str], *, owner: str = ""
) -> str:
    """Return the name of the lock that a call holds while it runs.

    Raises:
        ArgumentError: as `unique_key`.
    """
    if not how:
        return f"machinery:exclusive:{name}:{_digest(owner, name, *_canonical(call, args))}"
    return key_text(name, call, args, how, "exclusive_key")


def key_text(name: str, call: Call | None, args: Sequence[Arg], how: Any, option: str) -> str:
    """Return the key of a call: one rule for all options that are a key.

    A text that names a parameter means its value, any other text means itself; a function of the
    arguments returns the key.
    """
    if isinstance(how, str) and call is not None and how in call.names:
        placed, named = call.sorted_out(args)
        given = dict(zip(call.places, placed, strict=False)) | named
        value = _part(given[how])[1] if how in given else None  # a default that cannot be sent
        return f"{how}={value if isinstance(value, str) else _encoded(name, value).decode()}"
    if callable(how) and call is not None:
        values, named = call.values(args)
        try:
            how = how(*values, **named)
        except Exception as error:  # user code
            raise ArgumentError(
                f"{name}: the function given as {option} failed: {type(error).__name__}: {error}"
            ) from error
    if not isinstance(how, str) or not how:
        raise ArgumentError(f"{name}: {option} gives {how!r} (expected a text that is not empty)")
    return how


def _canonical(call: Call | None, args: Sequence[Arg]) -> tuple[object, object]:
    placed, named = call.sorted_out(args) if call is not None else (list(args), {})
    return [_part(arg) for arg in placed], {key: _part(arg) for key, arg in named.items()}


def _part(arg: Arg) -> tuple[str, object]:
    return arg.type, _in_order(arg.value) if arg.type == "py" else arg.value


def _in_order(value: Any) -> Any:
    """Return a py value with its sets and dicts in one order: equal ones have one key."""
    if type(value) is list:
        return [_in_order(item) for item in value]
    if type(value) is not dict:
        return value
    value = {key: _in_order(item) for key, item in value.items()}
    if value.get("$") in ("set", "frozenset", "dict") and type(value.get("v")) is list:
        value["v"].sort(key=_encode)
    return value


def _digest(owner: str, name: str, *parts: object) -> str:
    import hashlib  # 5 ms that only those pay who come here

    whole = [*([owner] if owner else ()), name, *parts]
    return hashlib.sha256(_encoded(name, whole)).hexdigest()


def _encoded(name: str, value: object) -> bytes:
    """Return JSON with sorted keys and without spaces: any program can make the same bytes."""
    try:
        return _encode(value)
    except UnicodeEncodeError as error:
        raise ArgumentError(f"{name}: its key cannot be made: {error}") from None
