"""A change in a Redis Cluster, taken apart: the decision in its own slot, effects in others.

An effect is a script, at the slot of a name. Any process may carry it out again. Effects are
remembered, with the outbox, in the record of the change, `mpy:o:{key}`: four bytes of length, the
outbox, and the effects.

The record of what a schedule sends is in the slot of all schedules, that of what is sent with a
claim in the slot of the claim. Its name begins with a mark that no quoted name begins with, and
that tells the slot.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

import msgspec

from machinery_py.backends.base import Change, Rider, claim_of
from machinery_py.backends.redis import cluster_scripts as scripts
from machinery_py.backends.redis.documents import Changes, packed_states
from machinery_py.connections.redis.client import raw
from machinery_py.connections.redis.keys import CLAIM, encoded, outbox_key
from machinery_py.connections.redis.scripts import Script, pack
from machinery_py.connections.redis.slots import quoted, unquoted
from machinery_py.tasks.states import TaskState
from machinery_py.wire.states import encode_group

_pack = msgspec.msgpack.Encoder().encode
_outbox = msgspec.msgpack.Decoder(tuple[bytes, ...]).decode


class Effect(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A step in the slot of `name`; `member` is the task of an arrival."""

    kind: str  # state, replay, group, arrival, fired
    name: str
    argument: bytes
    member: str = ""


_effects = msgspec.msgpack.Decoder(tuple[Effect, ...]).decode

SCRIPTS: dict[str, Script] = {
    "state": scripts.CHANGE,
    "replay": scripts.CHANGE,
    "group": scripts.GROUP,
    "arrival": scripts.ARRIVE,
    "fired": scripts.LOOK_AT,
}


SCHEDULES = b"mpy:{mpy:records}:"  # the slot of the schedules, and of the records of what they send
TICK = "tick "  # what the keys of those begin with
_TICK, _CLAIM = "%=", "%!"  # what these are told from UUIDs by


def name_of(uuid: str) -> str:
    """Return a UUID as our keys have it."""
    return quoted(encoded(uuid).decode())


def tick_name(key: str) -> str:
    """Return the key of what a schedule sends, as our keys have it."""
    return _TICK + name_of(key)


def claim_name(key: str) -> str:
    """Return the key of what is sent with a claim, as our keys have it."""
    return _CLAIM + name_of(key)


def names_of(key: str) -> tuple[str, ...]:
    """Return the names under which there may be a record with this key."""
    if key.startswith(TICK):
        return name_of(key), tick_name(key)
    return (name_of(key), claim_name(key)) if claim_of(key) is not None else (name_of(key),)


def key_of(name: str) -> str:
    """Return the UUID or key that has this name."""
    return unquoted(name.removeprefix(_TICK).removeprefix(_CLAIM))


def claim_prefix(claim: str) -> bytes:
    """Return the key prefix that puts a claim into its slot."""
    return b"mpy:{%b}:" % name_of(claim).encode()


def claim_key(claim: str) -> bytes:
    return b"%b{%b}" % (CLAIM, name_of(claim).encode())


def record_key(name: str) -> bytes:
    if name.startswith((_TICK, _CLAIM)):
        return b"%bo:%b" % (prefix_of(name), name.encode())
    return outbox_key(name)


def prefix_of(name: str) -> bytes:
    """Return the key prefix that puts a task or group, and its record, into one slot."""
    if name.startswith(_TICK):
        return SCHEDULES
    if name.startswith(_CLAIM):
        return claim_prefix(claim_of(key_of(name)) or "")
    return b"mpy:{%b}:" % name.encode()


class Parts(msgspec.Struct, gc=False):
    """A change: the decision in its own slot, if there is one, its outbox, and its effects."""

    name: str
    own: Changes | None
    effects: tuple[Effect, ...]
    held: bool = False  # whether results are kept for a callback
    force: bool = False
    fires: bool = False
    outbox: bytes = b""  # with its length before it; empty without messages

    @property
    def record(self) -> bytes:
        """Empty if nothing is to be remembered."""
        if self.own is None or not (self.outbox or self.effects):
            return b""
        return (self.outbox or framed(())) + _pack(self.effects)


def framed(outbox: Sequence[bytes]) -> bytes:
    packed = _pack(tuple(outbox))
    return len(packed).to_bytes(4, "big") + packed


def read_record(record: bytes) -> tuple[tuple[bytes, ...], tuple[Effect, ...]]:
    """Return outbox and effects."""
    size = 4 + int.from_bytes(record[:4], "big")
    return _outbox(record[4:size]), _effects(record[size:])


def parts_of(change: Change, now: dt.datetime, now_text: str, expire: int) -> Parts:
    """Take it apart. `now_text`: as the scripts take it."""
    name = name_of(change.fires or change.key)
    own: list[object] = []
    effects: list[Effect] = []
    for state in change.states:
        row = _row(state, now, expire)
        if row[0] == name:
            own += row
            continue
        foreign = Changes(now, expire)
        foreign.add(key="", force=change.force, packed=row)
        kind = "replay" if change.force else "state"
        argument = pack((now_text, expire, foreign.changes, foreign.states, "", False, 0))
        effects.append(Effect(kind, str(row[0]), argument))
    for group in change.groups:
        group_name = name_of(group.group_uuid)
        effects.append(Effect("group", group_name, pack((group_name, raw(encode_group(group))))))
    for one in change.arrivals:
        group_name, member = name_of(one.group_uuid), name_of(one.task_uuid)
        row = (group_name, member, one.total, one.ok, raw(one.callback))
        effects.append(Effect("arrival", group_name, pack((row,)), member))
    if change.fires:
        effects.append(Effect("fired", name, pack((name,))))
    decides = own or change.fires or change.epoch or change.outbox
    decision = Changes(now, expire)
    decision.add(
        key=name,
        mark=change.mark,
        epoch=change.epoch,
        force=change.force,
        fires=name if change.fires else "",
        packed=own,
    )
    return Parts(
        name,
        decision if decides else None,
        tuple(effects),
        held=any(one.callback for one in change.arrivals),
        force=change.force,
        fires=bool(change.fires),
        outbox=framed(change.outbox) if change.outbox else b"",
    )


def parts_with(rider: Rider, change: Change, now: dt.datetime, now_text: str, expire: int) -> Parts:
    """Take what becomes true with a record apart. All its states are in other slots."""
    alone = Change(key="", states=change.states, groups=change.groups)
    effects = parts_of(alone, now, now_text, expire).effects
    outbox = framed(change.outbox) if change.outbox else b""
    name = (claim_name if rider.life else tick_name)(change.key)
    return Parts(name, Changes(now, expire), effects, outbox=outbox)


def _row(state: TaskState, now: dt.datetime, expire: int) -> tuple[object, ...]:
    row, _ = packed_states((state,), now, expire)
    return (name_of(state.task_uuid), *row[1:])
