"""Groups in memcached: which members have arrived, which groups are complete, and who fires one.

    <group UUID>          Go's document; our last field says when it was made
    mpy:c:<group>         callback and total, written before the first arrival; never changed
    mpy:a:<group>         the members that have arrived, 8 bytes of hash each; they are appended
    mpy:r:<group>         the group is ready; the failed member, or nothing. Written once, by `add`
    mpy:f:<group>         the group is fired, with its outbox. Written once (backend.py)

A member may be appended twice (its worker had died, or a reply was lost). So whoever has appended
some reads the item, and when it is as long as the group is large, counts each member once.

Go counts by reading all states, and writes its flag without `cas` and without looking who was
faster. So a group with members that Go has ended is left to Go for GO_TIME
(`BackendFeatures.foreign_time`). If no flag has come by then (our member was the last one, or the
Go worker died) it is ours. Go sets the flag of a group with a failed member, too, and then tells
nobody.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence

import msgspec

from machinery_py.backends.base import ReadyGroup
from machinery_py.backends.memcached.documents import (
    CHORD_LIFE,
    decode_meta,
    encode_meta,
    is_meta,
    key_of,
    pack,
    state_in,
)
from machinery_py.backends.memcached.index import Index
from machinery_py.clock import micros
from machinery_py.connections.memcached.client import (
    STORED,
    Item,
    LineCommand,
    MemcacheDriver,
    add,
    append,
    delete,
    rounds,
    seconds,
    swap,
    touch,
)
from machinery_py.connections.memcached.keys import ARRIVED, CALLBACK, FIRED, READY
from machinery_py.errors import DecodeError
from machinery_py.tasks.states import Arrival, GroupMeta
from machinery_py.texts import get_logger, quoted

logger = get_logger(__name__)

GO_TIME = 1.0  # seconds that a Go worker has from the end of its member to its flag
HASH = 8  # bytes; of 100,000 members two share one in 1 of 4,000,000,000 chords


PARTS = (CALLBACK, ARRIVED, READY, FIRED)  # beside the document

_callback = msgspec.msgpack.Decoder(tuple[bytes, int]).decode
_LIFE = seconds(CHORD_LIFE)


class MemcachedGroups:
    """Groups on the driver's servers. May be used from any thread."""

    def __init__(self, driver: MemcacheDriver, index: Index, *, expire_in: float) -> None:
        self._driver = driver
        self._index = index
        self._expire_in = expire_in

    def now(self) -> int:
        """Return µs since 1970."""
        return micros(self._driver.clock.now())

    # Documents

    def create(self, groups: Sequence[GroupMeta]) -> None:
        """Create the groups that are not there yet."""
        now = self.now()
        commands = [add(key_of(one.group_uuid), encode_meta(one, now), _LIFE) for one in groups]
        self._driver.send(commands, doing="creating a group")

    def get(self, group_uuid: str, is_kept: Callable[[Sequence[str]], bool]) -> GroupMeta | None:
        """Return the group. An old one has expired if `is_kept` knows none of its members."""
        key, fired = key_of(group_uuid), key_of(group_uuid, FIRED)
        found = self._driver.fetch([key, fired], doing="reading a group")
        if key not in found:
            return None
        try:
            group, made_at = decode_meta(found[key].value)
        except DecodeError as error:
            raise DecodeError(
                f"the item {quoted(group_uuid)} in memcached is no group of ours (choose another "
                f"UUID, or delete the item): {error}"
            ) from error
        old = made_at and made_at + int(self._expire_in * 1e6) < self.now()
        if old and not is_kept(group.task_uuids):
            return None
        return msgspec.structs.replace(group, chord_triggered=True) if fired in found else group

    def purge(self, group_uuid: str) -> None:
        key = key_of(group_uuid)
        document = self._driver.fetch([key], doing="reading a group").get(key)
        keys = [key_of(group_uuid, part) for part in PARTS]
        if document is not None and is_meta(document.value):
            keys.append(key)
        self._driver.send([delete(key) for key in keys], doing="purging a group")
        self._index.drop(groups=[group_uuid])

    # Arrivals

    def announce(self, arrivals: Sequence[Arrival]) -> None:
        """Keep the callbacks, before anybody arrives."""
        first = {one.group_uuid: one for one in arrivals if one.callback}
        self._driver.send(
            [
                add(key_of(uuid, CALLBACK), pack((one.callback, one.total)), _LIFE)
                for uuid, one in first.items()
            ],
            doing="keeping a callback",
        )

    def arrive(self, arrivals: Sequence[tuple[str, str, int, bool]]) -> None:
        """Count each member once, and make its group ready when it is complete or broken."""
        hashes: dict[str, bytes] = {}
        totals: dict[str, int] = {}
        ready: dict[str, str] = {}
        for group, member, total, ok in arrivals:
            hashes[group] = hashes.get(group, b"") + _hash(member)
            totals[group] = total
            if not ok:
                ready.setdefault(group, member)
        self._join(hashes)
        keys = {key_of(group, ARRIVED): group for group in hashes if group not in ready}
        for key, item in self._driver.fetch(keys, doing="counting an arrival").items():
            if _are_all(item.value, totals[keys[key]]):
                ready[keys[key]] = ""  # complete
        self._make_ready(ready)

    def _join(self, hashes: Mapping[str, bytes]) -> None:
        """Append members to those that have arrived."""
        doing, missing = "counting an arrival", list(hashes)
        for _ in rounds(doing):
            for command in (append, _begin):  # the first arrival makes the item
                commands = [command(key_of(one, ARRIVED), hashes[one]) for one in missing]
                commands += [touch(key_of(one, ARRIVED), _LIFE) for one in missing]
                replies = self._driver.send(commands, doing=doing)
                missing = [
                    one for one, reply in zip(missing, replies, strict=False) if reply != STORED
                ]
                if not missing:
                    return

    def _make_ready(self, ready: dict[str, str]) -> None:
        """Write for each group its failed member, or "" if it is complete."""
        if ready:
            self._index.note(groups=list(ready))
            commands = [
                add(key_of(group, READY), member.encode("utf-8", "surrogatepass"), _LIFE)
                for group, member in ready.items()
            ]
            self._driver.send(commands, doing="making a group ready")

    def _expire(self, members: Sequence[str]) -> None:
        """Keep the members' results no longer than other results, or than their calls say."""
        doing = "letting results expire"
        commands: list[LineCommand] = []
        for key, item in self._driver.fetch(map(key_of, members), doing=doing).items():
            state = state_in(item.value)
            life = self._expire_in if state is None else state.life(self._expire_in)
            commands.append(touch(key, seconds(life)))
        self._driver.send(commands, doing=doing)

    # Firing

    def ready(self, limit: int) -> list[ReadyGroup]:
        """Return groups that are ready and not fired."""
        names = sorted(one.key for one in self._index.names() if one.is_group)
        found = self._driver.fetch(
            [key_of(name, prefix) for name in names for prefix in (READY, FIRED, CALLBACK)],
            doing="reading ready groups",
        )
        ready: list[ReadyGroup] = []
        for name in names:
            member = found.get(key_of(name, READY))
            callback = found.get(key_of(name, CALLBACK))
            if key_of(name, FIRED) in found:
                self._index.drop(groups=[name])
            elif member is not None and callback is None:
                logger.error(
                    "the callback of %s is not in memcached any more, and will never be called",
                    name,
                )
                self._index.drop(groups=[name])
            elif member is not None and callback is not None:
                ready.append(
                    ReadyGroup(
                        group_uuid=name,
                        callback=_callback(callback.value)[0],
                        failed_member=member.value.decode("utf-8", "surrogatepass"),
                    )
                )
        return ready[:limit]

    def settled_by_go(self, groups: Sequence[str]) -> dict[str, bool]:
        """Return whether Go has settled them, of those that there are."""
        parts = (b"", READY, CALLBACK)
        keys = {group: [key_of(group, part) for part in parts] for group in groups}
        items = self._driver.fetch(itertools.chain(*keys.values()), doing="firing a group")
        found: dict[str, bool] = {}
        for group, (document, ready, callback) in keys.items():
            if document in items or ready in items or callback in items:
                # With a failed member Go sets its flag, and tells nobody.
                has_failed = ready in items and items[ready].value
                found[group] = (
                    not has_failed and document in items and _go_fired(items[document].value)
                )
        return found

    def after_fire(self, group_uuid: str) -> None:
        """Set Go's flag, and let the group and its members' results expire, except the firing."""
        self._index.drop(groups=[group_uuid])
        expiry = seconds(self._expire_in)
        keys = [key_of(group_uuid, part) for part in PARTS if part != FIRED]
        commands = [touch(key, expiry) for key in keys]
        self._driver.send(commands, doing="letting a group expire")
        members: list[str] = []

        def set_flag(key: bytes, item: Item | None) -> LineCommand | None:
            members.clear()
            if item is None:
                return None
            try:
                group, made_at = decode_meta(item.value)
            except DecodeError as error:
                logger.warning(
                    "the item of group %s in memcached is no group: %s", group_uuid, error
                )
                return None
            if group.group_uuid != group_uuid:
                return None  # somebody else's
            members.extend(group.task_uuids)
            body = encode_meta(msgspec.structs.replace(group, chord_triggered=True), made_at)
            return None if group.chord_triggered else swap(key, body, _LIFE, item)

        self._driver.edit([key_of(group_uuid)], set_flag, doing="writing a group")
        self._expire(members)


def _go_fired(document: bytes) -> bool:
    try:
        return decode_meta(document)[0].chord_triggered
    except DecodeError:
        return False


def _are_all(value: bytes, total: int) -> bool:
    """Return whether so many members are among the hashes."""
    if len(value) // HASH < total:
        return False
    return len({value[at : at + HASH] for at in range(0, len(value), HASH)}) >= total


def _begin(key: bytes, value: bytes) -> LineCommand:
    return add(key, value, _LIFE)


def _hash(member: str) -> bytes:
    return hashlib.blake2b(member.encode("utf-8", "surrogatepass"), digest_size=HASH).digest()
