"""`redis://`, `rediss://`, `redis+socket://`: broker and backend on one Redis, or in one cluster.

Each batch is one script, and one round trip. A delivery is removed from this session's
hold before anything is written for it. If it was not there, the lease is lost: that is lease,
acknowledgement and fence at once. The steps and their crash points:
docs/explanation/redis-protocol.md.

In a cluster all keys are on one master, and nothing else differs: connections/redis/cluster.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import redis as _redis  # noqa: F401 – the drivers load it when they connect, and a fork may come in between there

from machinery_py.backends.base import CONFLICT, Backend, Keeping, Verdict
from machinery_py.backends.redis.backend import VERDICTS, RedisBackend, packed_checkpoints
from machinery_py.backends.redis.documents import Changes, new_state, packed_states
from machinery_py.backends.redis.scripts import CONSTANTS as STATES
from machinery_py.bounds import STEP_BYTES, STEP_ITEMS, TOKEN_LIFE
from machinery_py.brokers.base import Broker, Delivery, Fate, mark_of
from machinery_py.brokers.entries import RETRY_MARK, SET_BACK, ClockWatch
from machinery_py.brokers.redis.broker import RedisBroker
from machinery_py.brokers.redis.consumer import RedisConsumer, end_of
from machinery_py.brokers.redis.messages import (
    Queues,
    full,
    label_of,
    packed,
    packed_batch,
    packed_limits,
)
from machinery_py.brokers.redis.scripts import CONSTANTS as MESSAGES
from machinery_py.clock import Clock, micros
from machinery_py.config.sections import RedisConfig
from machinery_py.config.server_urls import BadUrl, parse_redis_url
from machinery_py.config.urls import redact, split_urls
from machinery_py.connections.failover import strategy_named
from machinery_py.connections.redis.client import RedisDriver
from machinery_py.connections.redis.cluster import ClusterDriver
from machinery_py.connections.redis.discovery import Servers
from machinery_py.connections.redis.keys import OPEN, encoded, queue_keys
from machinery_py.connections.redis.pool import PoolLimits
from machinery_py.connections.redis.scripts import Folder, pack
from machinery_py.errors import BrokerUnavailable, ConfigError, PublishUnknown
from machinery_py.limits.redis import RedisLimits
from machinery_py.locks.redis import RedisLock
from machinery_py.names import is_made
from machinery_py.stores.base import (
    Firing,
    Mark,
    Session,
    Settlement,
    Store,
    Submission,
    carried_along,
    disposal_of,
)
from machinery_py.stores.open import Family, FamilyOptions
from machinery_py.stores.redis_steps import StagedSteps
from machinery_py.tasks.states import State
from machinery_py.wire.decode import known_fields
from machinery_py.wire.states import encode_group

# Where the values of a settlement stand, from its place on; see settle.lua.
_END = ("END_QUEUE", "END_RECEIPT", "END_FATE", "END_CHANGE", "END_MORE")
_ENDS: dict[str, object] = {"END": len(_END), **{name: at for at, name in enumerate(_END)}}

# Queues and messages are as putting.lua says, changes and states as changes.lua.
_lua = Folder("stores/lua", MESSAGES | STATES | _ENDS, away=BrokerUnavailable)

NEW = _lua.script("new", "publishing", TOKEN_LIFE=TOKEN_LIFE)
SUBMIT = _lua.script("submit", "publishing", TOKEN_LIFE=TOKEN_LIFE)
SETTLE = _lua.script("settle", "settling")
KEEP = _lua.script("keep", "keeping checkpoints")
FIRE = _lua.script("fire", "settling a group or a task")


class RedisStore(Store):
    """A broker and a backend on one server."""

    def __init__(self, broker: RedisBroker, backend: RedisBackend) -> None:
        if broker.driver is not backend.driver:
            raise ValueError("a RedisStore needs a broker and a backend of one driver")
        self.broker: Broker = broker
        self.backend: Backend = backend
        self.messages = broker
        self.states = backend
        self.driver: RedisDriver = broker.driver
        self._steps = StagedSteps(self.driver, backend.seconds)
        self._watch = ClockWatch(self.driver.clock)

    def is_entered(self) -> bool:
        return False  # each call has a connection of its own, and no lock is held meanwhile

    def submit(self, submission: Submission) -> bool:
        plain = is_plain(submission)
        messages, riders = submission.messages, submission.riders
        if len(messages) > 1 and (submission.token or riders) and self._steps.wants(messages):
            return self._steps.submit(submission, plain=plain)
        if plain and len(submission.states) <= STEP_ITEMS:
            to_wake = self.submit_new(submission)
            if to_wake is not None:
                self.driver.unblock(to_wake)
                return True
        keys, rows = packed_batch(submission.messages)
        limits = packed_limits(submission.limits, keys) if submission.limits else ()
        change = Changes(self.driver.clock.now(), self.states.seconds)
        if submission.states or submission.groups or riders:
            change.add(
                key=f"submit {submission.token}",
                riders=riders,
                states=submission.states,
                groups=submission.groups,
                force=submission.replay,
            )
        token = "" if riders else submission.token
        values = (self.driver.now(), self.states.seconds, token, limits, keys, rows)
        to_wake = self.driver.run(
            SUBMIT,
            *values,
            *change.packed(),
            again=bool(token or riders),
            lost=PublishUnknown if messages else None,
        )
        if to_wake is None:
            return False
        if isinstance(to_wake, bytes):
            raise full(to_wake, submission.limits, keys)
        if to_wake:
            self.driver.unblock(to_wake)
        return True

    def submit_new(self, submission: Submission) -> list[bytes] | None:
        """Return connections to be woken; None, if something is there already of what is new."""
        now, seconds = self.driver.clock.now(), self.states.seconds
        states, groups, messages = submission.states, submission.groups, submission.messages
        more: list[bytes] = []
        for state in states:
            more += new_state(state, now, seconds)
        for group in groups:
            more += (group.group_uuid.encode(), encode_group(group))
        more += [message.body for message in messages]
        queue, counts = queue_keys(messages[0].queue), (len(states), len(groups))
        values = (self.driver.now(), seconds, submission.token, queue, *counts)
        found: list[bytes] | None = self.driver.run(NEW, *values, more=more, lost=PublishUnknown)
        return found

    def open_session(self, queues: Sequence[str], *, worker: str) -> Session:
        return RedisSession(self, self.messages.consume(queues, worker=worker))

    def fire(self, firing: Firing) -> bool:
        change = Changes(self.driver.clock.now(), self.states.seconds)
        change.add(
            key=firing.task_uuid or firing.group_uuid,
            fires=firing.group_uuid,
            states=firing.states,
            groups=firing.groups,
            arrivals=firing.arrivals,
            riders=firing.riders,
        )
        batch = packed_batch(firing.send)
        values = (self.driver.now(), self.states.seconds, *batch, *change.packed())
        to_wake = self.driver.run(FIRE, *values, again=False)
        if to_wake is None:
            return False
        self.driver.unblock(to_wake)
        return True

    def tend(self) -> float:
        if self._watch.was_set_back():
            self._count_again()
        pause = min(self.broker.tend(), self.backend.tend())
        return 0.0 if self._steps.carry_left() else pause

    def _count_again(self) -> None:
        """Let delays of retries that began in the future, by a clock that was ahead, begin now.

        A message in Go's delayed set has its ETA alone. When it was sent is when its task changed.
        """
        now = micros(self.driver.clock.now())
        ahead, doing = b"(%d" % (now + int(SET_BACK * 1e6)), "moving retries"
        found = self.driver.ask(
            b"ZRANGEBYSCORE", OPEN.encode(), ahead, b"+inf", b"WITHSCORES", doing=doing
        )
        begun = dict(zip(found[::2], map(float, found[1::2]), strict=True))
        if not begun:
            return
        key = self.driver.limits.delayed_key.encode()
        for member, due in self.messages.sorted_set(key, doing=doing):
            said = known_fields(member) if RETRY_MARK in member else None
            if said is not None and (began := begun.get(encoded(said.UUID))) is not None:
                score = b"%d" % (int(float(due)) + int(now - began) * 1000)  # nanoseconds
                self.driver.ask(b"ZADD", key, b"XX", score, member, doing=doing)


def is_plain(submission: Submission) -> bool:
    """Return whether plain.lua can take it: what most senders send."""
    if not submission.token or submission.limits or submission.replay or submission.riders:
        return False
    queue = submission.messages[0].queue if submission.messages else ""
    return (
        bool(queue)
        and bool(submission.states)
        and all(
            one.queue == queue
            and one.eta is None
            and not (one.priority or one.parks or label_of(one))
            for one in submission.messages
        )
        and all(
            one.state is State.PENDING and not one.run and is_made(one.task_uuid)
            for one in submission.states
        )
        and all(is_made(one.group_uuid) for one in submission.groups)
    )


class RedisSession(Session):
    """A consumer of the one store."""

    def __init__(self, store: RedisStore, consumer: RedisConsumer) -> None:
        self._store = store
        super().__init__(consumer)
        self.consumer: RedisConsumer = consumer
        # With their packed states, by id.
        self._prepared: dict[int, tuple[Settlement, list[object]]] = {}

    def receive(self, limit: int, timeout: float, order: Sequence[str] = ()) -> list[Delivery]:
        deliveries = self.consumer.receive(limit, timeout, order)
        self.none_revoked: bool = self.consumer.none_revoked
        return deliveries

    def keep(self, delivery: Delivery, keeping: Keeping) -> Verdict:
        consumer, session = self.consumer, self.consumer.session
        index, receipt = consumer.place_of(delivery, session)
        values = (session, consumer.keys[index][1], receipt, *packed_checkpoints(keeping))
        return VERDICTS[self._store.driver.run(KEEP, *values)[0]]

    def prepare(self, settlement: Settlement) -> int:
        states, size = settlement.states, len(settlement.delivery.body)
        if settlement.send or settlement.arrivals or settlement.riders:
            size += carried_along(settlement)
        if states:
            try:
                moment, expire = states[0].created_at, self._store.states.seconds
                packed, carried = packed_states(states, moment, expire)
            except Exception:  # `settle` raises it, where it is dealt with
                return size
            self._prepared[id(settlement)] = settlement, packed
            size += carried
        return size

    def settle(
        self, settlements: Sequence[Settlement], marks: Sequence[Mark] = ()
    ) -> list[Verdict]:
        backend, driver = self._store.states, self._store.driver
        consumer, prepared = self.consumer, self._prepared
        session, place_of = consumer.session, consumer.place_of
        queues = Queues(consumer.queues) if any(one.send for one in settlements) else None
        changes = Changes(driver.clock.now(), backend.seconds)
        ends: list[object] = []
        for one in settlements:
            change = (
                changes.add(
                    key=one.uuid,
                    mark=mark_of(one.delivery),
                    states=one.states,
                    groups=one.groups,
                    arrivals=one.arrivals,
                    riders=one.riders,
                    packed=prepared.pop(id(one), (one, None))[1],
                )
                if one.states or one.groups or one.arrivals or one.riders
                else 0
            )
            if one.send or one.fate is not Fate.DONE:
                fate, due, head = end_of(disposal_of(one), driver.clock.now())
                send = [packed(message, queues) for message in one.send] if queues else []
                ends += (*place_of(one.delivery, session), fate, change, (due, head, send))
            else:
                ends += (*place_of(one.delivery, session), "done", change, False)
        seen: list[object] = []
        for mark in marks:
            change = changes.add(key=mark.state.task_uuid, states=(mark.state,))
            seen += (*place_of(mark.delivery, session), change)
        if not ends and not seen:
            return []
        keys = queues.keys if queues is not None else consumer.keys
        values = (driver.now(), backend.seconds, session, keys, ends, seen)
        argument = pack((*values, *changes.packed()))
        if len(argument) > STEP_BYTES and len(settlements) > 1:
            half = len(settlements) // 2
            first = self.settle(settlements[:half], marks)
            return [*first, *self.settle(settlements[half:])]
        letters, to_wake = driver.run_packed(SETTLE, argument)
        if to_wake:
            driver.unblock(to_wake)
        verdicts = [VERDICTS[letter] for letter in letters]
        over = zip(settlements, verdicts, strict=True)
        consumer.note_ended([one.delivery for one, verdict in over if verdict is not CONFLICT])
        return verdicts


def open_redis(url: str, options: FamilyOptions) -> Family:
    """Return the stores in a cluster, if URL or configuration say so, else on one server.

    Raises:
        ConfigError: URL and options make no sense, alone or together.
    """
    urls = split_urls(url, options.separator)
    shown = ", ".join(map(redact, urls))
    try:
        parsed = [parse_redis_url(one, master_name=options.redis.master_name) for one in urls]
    except BadUrl as error:
        raise ConfigError(f"{shown}: {error}") from None
    if not options.redis.cluster_mode and not any(one.is_cluster for one in parsed):
        if any(one.tag for one in parsed):
            raise ConfigError(f"{shown}: option 'tag' is for a cluster (see redis.cluster_mode)")
        return RedisFamily(url, options, _driver(url, options))
    if len(parsed) > 1:
        raise ConfigError(
            f"{shown}: found several URLs (a cluster is one URL that lists some of its nodes: redis://h1,h2,h3)"
        )
    if parsed[0].master_name or parsed[0].path or parsed[0].database:
        raise ConfigError(
            f"{shown}: redis.cluster_mode: a cluster has no sentinels, no socket, and database 0 "
            "only"
        )
    if options.go_program:
        raise ConfigError(
            f"{shown}: go_program: in a Redis Cluster our keys have a hash tag, which Go's keys "
            "have not: the two would not see each other (take one Redis, or sentinels)"
        )
    return RedisFamily(url, options, _cluster_driver(url, options))


class RedisFamily(Family):
    """Stores on the driver's server, connected at the first use."""

    keeps_time = True

    def __init__(self, url: str, options: FamilyOptions, driver: RedisDriver) -> None:
        super().__init__(url, options)
        self._driver = driver
        self.clock: Clock = driver.clock

    def broker(self) -> RedisBroker:
        return RedisBroker(self._driver, lease=self.options.lease)

    def backend(self) -> RedisBackend:
        return RedisBackend(self._driver, expire_in=self.options.expire_in)

    def lock(self) -> RedisLock:
        return RedisLock(self._driver)

    def limits(self) -> RedisLimits:
        return RedisLimits(self._driver)

    def together(self) -> RedisStore:
        return RedisStore(self.broker(), self.backend())

    def close(self) -> None:
        self._driver.close()


def _driver(url: str, options: FamilyOptions) -> RedisDriver:
    return RedisDriver(
        clock=options.clock,
        timeout=options.timeout,
        servers=_servers(url, options),
        strict=options.strict_durability,
        limits=_limits_of(options.redis),
    )


def _cluster_driver(url: str, options: FamilyOptions) -> ClusterDriver:
    redis = options.redis
    return ClusterDriver(
        url,
        clock=options.clock,
        timeout=options.timeout,
        connect_timeout=redis.connect_timeout or math.inf,
        client_name=redis.client_name or "machinery",
        strict=options.strict_durability,
        limits=_limits_of(redis),
    )


def _limits_of(redis: RedisConfig) -> PoolLimits:
    """Go's 0 is no limit."""
    return PoolLimits(
        max_idle=redis.max_idle,
        max_active=redis.max_active,
        wait=redis.wait,
        idle_timeout=redis.max_idle_timeout or math.inf,
        read=redis.read_timeout or math.inf,
        write=redis.write_timeout or math.inf,
        block=redis.normal_tasks_poll_period / 1000,
        delayed_key=redis.delayed_tasks_key,
    )


def _servers(text: str, options: FamilyOptions) -> Servers:
    """Return the servers that the URLs and the options name.

    Raises:
        ConfigError: they make no sense.
    """
    urls = split_urls(text, options.separator)
    shown = ", ".join(map(redact, urls))
    redis = options.redis
    try:
        return Servers(
            urls,
            timeout=min(options.timeout, redis.connect_timeout or math.inf),
            strategy=strategy_named(options.strategy),
            client_name=redis.client_name or "machinery",
            master_name=redis.master_name,
        )
    except BadUrl as error:
        raise ConfigError(f"{shown}: {error}") from None
