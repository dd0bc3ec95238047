"""Groups in memcached: which members have arrived, which groups are complete, and who fires one.

    <group UUID>          Go's document; our last field says when it was made
    mpy:c:<group>         callback and total, written before the first arrival; never changed
    mpy:b:<i>:<group>     a share of the arrived members, 8 bytes of hash each; changed by `cas`
    mpy:n:<group>         a guess at how many have arrived, never too low; raised by `incr`
    mpy:r:<group>         the group is ready; the failed member, or nothing. Written once, by `add`
    mpy:f:<group>         the group is fired, with its outbox. Written once, by `add`, which decides

A member belongs to one share, so an arrival costs the same in a chord of any size. The shares are
counted when the guess reaches the total, or a member arrives a second time (its worker had died, or
a reply was lost). So the guess decides only when to look, and may be too high. It is never too low
when an arrival has ended: a process raises it after it has joined its share. Where there is no
guess (the first arrival, or it was evicted), one process counts the shares and writes that number
by `add`; all others raise it.

Go counts by reading all states, and writes its flag without `cas` and without looking who was
faster. So a group with members that Go has ended is left to Go for GO_TIME
(`BackendFeatures.foreign_time`). If no flag has come by then (our member was the last one, or the
Go worker died) it is ours. Go sets the flag of a group with a failed member, too, and then tells
nobody.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from machinery_py.backends.base import ReadyGroup
from machinery_py.backends.memcached.documents import (
    CHORD_LIFE,
    Commit,
    decode_commit,
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
    delete,
    incr,
    rounds,
    seconds,
    swap,
    touch,
)
from machinery_py.connections.memcached.keys import CALLBACK, FIRED, GUESS, READY, SHARES
from machinery_py.errors import DecodeError
from machinery_py.tasks.states import Arrival, GroupMeta
from machinery_py.texts import get_logger, quoted

logger = get_logger(__name__)

SHARE = 256  # members of a share, more or less
GO_TIME = 1.0  # seconds that a Go worker has from the end of its member to its flag
HASH = 8  # bytes; of 100,000 members two share one in 1 of 4,000,000,000 chords


_callback = msgspec.msgpack.Decoder(tuple[bytes, int]).decode
_LIFE = seconds(CHORD_LIFE)


class _Share(NamedTuple):
    group: str
    key: bytes


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
        keys = self._keys(group_uuid)
        if document is not None and is_meta(document.value):
            keys.append(key)
        self._driver.send([delete(key) for key in keys], doing="purging a group")
        self._index.drop(groups=[group_uuid])

    def _keys(self, group_uuid: str, *, but: bytes = b"") -> list[bytes]:
        """Return the keys of all that is kept of a group beside its document."""
        callback = key_of(group_uuid, CALLBACK)
        found = self._driver.fetch([callback], doing="reading a group")
        total = _callback(found[callback].value)[1] if found else 0
        prefixes = (prefix for prefix in (CALLBACK, GUESS, READY, FIRED) if prefix != but)
        return [key_of(group_uuid, prefix) for prefix in prefixes] + _share_keys(group_uuid, total)

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
        members: dict[_Share, set[bytes]] = {}
        totals: dict[str, int] = {}
        failed: dict[str, str] = {}
        for group, member, total, ok in arrivals:
            share = _Share(group, _share_key(group, _number(member, total)))
            members.setdefault(share, set()).add(_hash(member))
            totals[group] = total
            if not ok:
                failed.setdefault(group, member)
        again = self._join(members)
        joined: dict[str, int] = {}
        for one, hashes in members.items():
            joined[one.group] = joined.get(one.group, 0) + len(hashes)
        look = self._guess(joined, totals) | again
        for group in look - failed.keys():
            if self._count(group, totals[group]) >= totals[group]:
                failed[group] = ""  # complete
        self._make_ready(failed)
        self._expire_late(arrivals)

    def _join(self, members: dict[_Share, set[bytes]]) -> set[str]:
        """Put members into their shares; return the groups where some were before."""
        again: set[str] = set()
        shares = {share.key: share for share in members}

        def join(key: bytes, item: Item | None) -> LineCommand | None:
            hashes, value = members[shares[key]], item.value if item else b""
            missing = hashes - {value[at : at + HASH] for at in range(0, len(value), HASH)}
            if len(missing) < len(hashes):
                again.add(shares[key].group)
            joined = value + b"".join(sorted(missing))
            return swap(key, joined, _LIFE, item) if missing else None

        self._driver.edit(shares, join, doing="counting an arrival")
        return again

    def _guess(self, joined: dict[str, int], totals: dict[str, int]) -> set[str]:
        """Raise the guesses; return the groups that may be complete now."""
        look: set[str] = set()
        waiting = list(joined)
        for _ in rounds("counting an arrival"):
            commands = [incr(key_of(group, GUESS), joined[group]) for group in waiting]
            # Not repeated: after a lost reply the whole change comes again, and raises it again.
            replies = self._driver.send(commands, doing="counting an arrival", again=False)
            counts = {
                group: int(reply) if reply.isdigit() else self._begin_guess(group, totals[group])
                for group, reply in zip(waiting, replies, strict=True)
            }
            look.update(group for group, count in counts.items() if count >= totals[group])
            waiting = [group for group, count in counts.items() if not count]
            if not waiting:
                break
        return look

    def _begin_guess(self, group: str, total: int) -> int:
        """Write what the shares say. 0: somebody else has just done so."""
        count = self._count(group, total)
        command = add(key_of(group, GUESS), b"%d" % count, _LIFE)
        [reply] = self._driver.send([command], doing="counting an arrival", again=False)
        return count if reply == STORED else 0

    def _count(self, group: str, total: int) -> int:
        """Return how many members have arrived."""
        keys = _share_keys(group, total)
        items = self._driver.fetch(keys, doing="counting the members of a group")
        return sum(len(item.value) // HASH for item in items.values())

    def _make_ready(self, ready: dict[str, str]) -> None:
        """Write for each group its failed member, or "" if it is complete."""
        if ready:
            self._index.note(groups=list(ready))
            commands = [
                add(key_of(group, READY), member.encode("utf-8", "surrogatepass"), _LIFE)
                for group, member in ready.items()
            ]
            self._driver.send(commands, doing="making a group ready")

    def _expire_late(self, arrivals: Sequence[tuple[str, str, int, bool]]) -> None:
        """Shorten the life of members that arrived after their chord was fired."""
        keys = [key_of(group, FIRED) for group, _, _, _ in arrivals]
        fired = self._driver.fetch(keys, doing="reading a group")
        self._expire([one[1] for key, one in zip(keys, arrivals, strict=True) if key in fired])

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
        segments = self._index.segments().values()
        names = sorted({group for segment in segments for group in segment.groups})
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

    def fire(self, group_uuid: str, commit: Commit) -> bool:
        """Write the commit, if nobody has fired the group before."""
        key, document = key_of(group_uuid, FIRED), key_of(group_uuid)
        ready = key_of(group_uuid, READY)
        known = (document, ready, key_of(group_uuid, CALLBACK))
        found = self._driver.fetch([key, *known], doing="firing a group")
        if key in found or not found.keys() & set(known):
            return False
        has_failed = ready in found and found[ready].value
        if not has_failed and document in found and _go_fired(found[document].value):
            by_go = add(key, pack(Commit(b"go", self.now())), _LIFE)
            self._driver.send([by_go], doing="firing a group")
            self.after_fire(group_uuid)
            return False
        commit.nonce = secrets.token_bytes(8)
        if self._driver.send([add(key, pack(commit), _LIFE)], doing="firing a group") != [STORED]:
            item = self._driver.fetch([key], doing="firing a group").get(key)
            if item is None or decode_commit(item.value).nonce != commit.nonce:
                return False  # else our own, and its reply was lost
        return True

    def after_fire(self, group_uuid: str) -> None:
        """Set Go's flag, and let the group and its members' results expire, except the firing."""
        self._index.drop(groups=[group_uuid])
        expiry = seconds(self._expire_in)
        commands = [touch(one, expiry) for one in self._keys(group_uuid, but=FIRED)]
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


def _hash(member: str) -> bytes:
    return hashlib.blake2b(member.encode("utf-8", "surrogatepass"), digest_size=HASH).digest()


def _shares(total: int) -> int:
    return max(1, -(-total // SHARE))


def _number(member: str, total: int) -> int:
    return int.from_bytes(_hash(member)[:4], "big") % _shares(total)


def _share_key(group: str, number: int) -> bytes:
    return key_of(group, SHARES + b"%d:" % number)


def _share_keys(group: str, total: int) -> list[bytes]:
    return [_share_key(group, number) for number in range(_shares(total))]
