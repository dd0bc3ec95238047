"""Application: what sending and running share, and the way from a signature to a message."""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from machinery_py.brokers.base import Message
from machinery_py.brokers.queue_limits import QueueLimit
from machinery_py.clock import Clock
from machinery_py.config.config import Config
from machinery_py.connections.forks import ForkLock
from machinery_py.connections.server_clock import ServerClock
from machinery_py.control.lamport import LamportClock
from machinery_py.control.stream import ServerEvents
from machinery_py.errors import (
    ArgumentError,
    BackendUnavailable,
    BrokerUnavailable,
    DecodeError,
    MachineryError,
    NameRefused,
    PublishRefused,
    PublishUnknown,
    QueueFull,
    Unsupported,
)
from machinery_py.events import TaskSent
from machinery_py.limits.keeper import SlotKeeper
from machinery_py.locks.named import LockKeeper
from machinery_py.names import check_call, check_message, check_uuid, is_made
from machinery_py.registry.hooks import Hooks
from machinery_py.registry.options import TaskSettings, block_of, settings_of_call
from machinery_py.registry.outcomes import (
    ALONE,
    Arrived,
    Failed,
    FollowUp,
    broken,
    failing,
    follow_up,
)
from machinery_py.registry.registry import Registry
from machinery_py.registry.tenants import tenant_of
from machinery_py.stores.base import Refusal, Store, Submission
from machinery_py.stores.late import LateSubmissions
from machinery_py.stores.open import Stores
from machinery_py.tasks.backoff import full_jitter
from machinery_py.tasks.context import RUNNING, check_time, on_behalf_of
from machinery_py.tasks.lineage import inherited
from machinery_py.tasks.mailboxes import SILENT
from machinery_py.tasks.signature import (
    COUNTED,
    FIRST_ATTEMPT,
    FIRST_RUN,
    HEADER_ATTEMPTS,
    HEADER_ROOT,
    Lazy,
    Signature,
    counted,
    new_uuid,
)
from machinery_py.tasks.states import Arrival, GroupMeta, State, TaskState
from machinery_py.texts import get_logger
from machinery_py.threads import INSIDE
from machinery_py.transactions import HERE, current
from machinery_py.wire.signatures import LastEncoded, decode_signature, encode_signature

logger = get_logger(__name__)

PrePublish = Callable[[Signature[Any]], Signature[Any] | None]
T = TypeVar("T")


class Outgoing(msgspec.Struct, frozen=True):
    """Signatures ready to be published: their messages, and PENDING for each."""

    messages: Sequence[Message]
    states: Sequence[TaskState]
    groups: Sequence[GroupMeta]
    signatures: Sequence[Signature[Any]]


NOTHING = Outgoing((), (), (), ())

_PLAIN = TaskSettings()
FIRST_PAUSE = 0.05  # seconds until a submission is repeated
KEPT_WITH_EVENTS = 2_048  # bytes


class Application:
    """Tasks, stores, clock and hooks of one Server. May be used from any thread."""

    def __init__(self, config: Config, clock: Clock) -> None:
        self.config: Config = config
        self.clock: Clock = clock
        self.registry: Final = Registry()
        # One for all that this application sends and receives. It counts on from microseconds,
        # which no process reaches by counting: so it is later than those that ended before.
        self.lamport: Final = LamportClock(time.time_ns() // 1000)
        self.events: Final = ServerEvents(
            self.lamport, now=self.now, broker=lambda: self.store.broker
        )
        self.publisher: Final = self.events.publisher
        self.locks: Final = LockKeeper(lambda: self.stores.lock, lambda: self.config.lease)
        self.slots: Final = SlotKeeper(lambda: self.stores.limits, lambda: self.config.lease)
        self.pre_publish: PrePublish | None = None
        self.program = ""  # the `machinery` of this app alone, as "python manage.py machinery"
        self.hooks: Final = Hooks()
        self._encode_callback = LastEncoded()
        self._stores: Stores | None = None
        self._lock = ForkLock(reentrant=True)
        self._late = LateSubmissions(self._submit_late)
        self._attached: Callable[[], object] | None = None
        if config.events:
            self.publisher.enable()

    @property
    def stores(self) -> Stores:
        """Opened at the first use."""
        stores = self._stores
        if stores is None:
            with self._lock:
                stores = self._stores
                if stores is None:
                    stores = Stores(self.config, self.clock)
                    self._equip(stores)
                    self._stores = stores
        return stores

    @property
    def store(self) -> Store:
        return self.stores.store

    def attach(self, drain: Callable[[], object]) -> None:
        """Set the function that the eager store calls to run what it was given."""
        self._attached = drain

    def swap(
        self, config: Config, clock: Clock, stores: Stores | None = None
    ) -> tuple[Config, Clock, Stores | None]:
        """Work with another configuration, clock and stores from now on, for tests.

        Returns those before, which stay open: `swap(*before)` puts them back.

        Args:
            stores: opened from the configuration at the first use, if they are not given.
        """
        with self._lock:
            before = self.config, self.clock, self._stores
            self.config, self.clock, self._stores = config, clock, stores
            if stores is not None:
                self._equip(stores)
        return before

    def _equip(self, stores: Stores) -> None:
        stores.store.refusal = self.refusal
        if self._attached is not None:
            stores.store.attach(self._attached)

    @property
    def largest_call(self) -> int:
        """Bytes of the largest message that states of running and ended tasks keep; 0: of none."""
        limit = self.config.keep_calls
        return limit if limit >= 0 else KEPT_WITH_EVENTS if self.publisher.is_on else 0

    def close(self) -> None:
        """Give the stores back. May be called twice; the next use opens them again."""
        self._late.flush(self.config.publish_timeout)
        self.publisher.close()
        self.locks.close()
        self.slots.close()
        with self._lock:
            stores, self._stores = self._stores, None
        if stores is not None:
            stores.close()

    def outgoing(
        self,
        signatures: Sequence[Signature[Any]],
        groups: Sequence[GroupMeta] = (),
        awaited: Sequence[Signature[Any]] = (),
    ) -> Outgoing:
        """Make messages: UUID, queue, pre-publish hook, encoding, size.

        Args:
            awaited: sent later, by a worker, but PENDING from now on.

        Raises:
            ArgumentError: something in a signature cannot be sent.
            NameRefused: a name in one cannot be used.
        """
        if not signatures and not groups:
            return NOTHING
        for group in groups:
            check_uuid(group.group_uuid, self.config.default_queue)
        now = self.now()
        messages: list[Message] = []
        states: list[TaskState] = []
        sent: list[Signature[Any]] = []
        for given in signatures:
            signature = self.completed(given)
            if signature.name in SILENT:
                messages.append(self.message(signature))
                continue
            states.append(self.pending(signature, now))
            signature = self.stamped(signature)
            messages.append(self.message(signature))
            sent.append(signature)
        for later in awaited:
            queue = later.routing_key or self.config.default_queue
            states.append(self.pending(later.replace(routing_key=queue), now))
        return Outgoing(messages, states, groups, sent)

    def completed(self, signature: Signature[Any]) -> Signature[Any]:
        """Return it with UUID and queue, its delays counted from now, and changed by the hook."""
        if not signature.uuid or not signature.routing_key:
            signature = signature.replace(
                uuid=signature.uuid or new_uuid(),
                routing_key=signature.routing_key or self.config.default_queue,
            )
        if RUNNING.get() is not None:
            signature = signature.replace(headers=self._inherited(signature))
        if not COUNTED.isdisjoint(signature.headers):
            signature = counted(signature, self.moment())
        if self.pre_publish is not None and signature.name not in SILENT:
            signature = self.pre_publish(signature) or signature
        return signature

    def stamped(self, signature: Signature[Any]) -> Signature[Any]:
        """Return it with the logical clock of its sending, if events are sent."""
        return self.publisher.stamped(signature) if self.publisher.is_on else signature

    def _inherited(self, signature: Signature[Any], *, parent: str = "") -> Mapping[str, Any]:
        """Return its headers with those inherited from the task that sends it.

        Args:
            parent: in place of that task.
        """
        if (task := RUNNING.get()) is None:
            return signature.headers
        return inherited(signature, task, prefixes=self.config.inherited_headers, parent=parent)

    def _check_names(self, signature: Signature[Any]) -> None:
        """Check the names in a signature and in its callbacks, but not in those still encoded.

        Raises:
            NameRefused: one cannot be used.
        """
        waiting = [signature]
        while waiting:
            one = waiting.pop()
            if not is_made(one.uuid) or (one.group_uuid and not is_made(one.group_uuid)):
                check_message(
                    one.routing_key,
                    self.config.default_queue,
                    name=one.name,
                    uuid=one.uuid,
                    group_uuid=one.group_uuid,
                )
            else:
                check_call(one.name, one.routing_key)
            for nested in (one.on_success, one.on_error):
                if nested and type(nested) is not Lazy:
                    waiting += nested
            if one.chord_callback is not None:
                waiting.append(one.chord_callback)

    def message(self, signature: Signature[Any]) -> Message:
        self._check_names(signature)
        body = encode_signature(signature)
        limit = self.config.max_message_size
        if len(body) > limit and HEADER_ATTEMPTS in signature.headers:
            headers = {**signature.headers}
            del headers[HEADER_ATTEMPTS]  # a task is not lost for its history
            return self.message(signature.replace(headers=headers))
        if len(body) > limit:
            raise ArgumentError(
                f"{signature.name}: the message has {len(body):,} bytes, "
                f"more than max_message_size = {limit:,} (send an id and load the data in the task)"
            )
        return Message(
            uuid=signature.uuid,
            name=signature.name,
            queue=signature.routing_key,
            body=body,
            eta=signature.eta,
            priority=signature.priority,
            tenant=self.tenant_of(signature) if self.config.fair_queues else None,
        )

    def tenant_of(self, signature: Signature[Any]) -> str | None:
        """Return whose turn it takes in its queue; None if that is not fair."""
        field = self.config.fair_queues.get(signature.routing_key)
        task = self.registry.find(signature.name)
        return tenant_of(signature, task.call if task else None, field) if field else None

    def refusal(self, message: Message, error: Exception) -> Refusal:
        """Return what replaces a message that is refused for good: the failure of its task."""
        now, text = self.now(), f"it cannot be sent: {error}"
        signature = decode_signature(message.body)
        outcome = Failed(error=text, error_type=type(error).__name__, retryable=False)
        then, out = self.failed_unheld(signature, outcome, queue=message.queue)
        state = msgspec.structs.replace(
            self.pending(signature, now),
            state=State.FAILURE,
            error=text,
            error_type=then.error_type,
            finished_at=now,
            message=message.body,
            eta=None,
        )
        return Refusal(
            states=(state, *broken(then, signature, now), *out.states),
            send=out.messages,
            groups=out.groups,
            arrivals=self.arrivals(then.arrived),
            queue=self.config.default_queue,
        )

    def failed_unheld(
        self, signature: Signature[Any], outcome: Failed, *, queue: str
    ) -> tuple[FollowUp, Outgoing]:
        """Return what follows when a task fails that no worker holds, and what is sent then."""
        now = self.now()
        try:
            then = follow_up(signature, outcome, now=now)
        except DecodeError as error:
            logger.error("what follows task %s cannot be decoded: %s", signature.uuid, error)
            then = follow_up(signature.replace(on_success=(), on_error=()), outcome, now=now)
        with on_behalf_of(signature, queue=queue):
            try:
                return then, self.outgoing(then.send)
            except Exception:  # the pre-publish hook is user code
                logger.exception("the error callbacks of task %s cannot be sent", signature.uuid)
                return then, NOTHING

    def submit(
        self,
        signatures: Sequence[Signature[Any]],
        groups: Sequence[GroupMeta] = (),
        awaited: Sequence[Signature[Any]] = (),
        *,
        token: str = "",
    ) -> None:
        """Publish; `awaited` as for `outgoing`.

        Args:
            token: of this submission, if a repeat of it is to have the same one.

        Raises:
            ArgumentError, PublishRefused, PublishUnknown, Unsupported: as Server.send_task.
        """
        is_late = self.is_entered()
        if not is_late:
            self.check_asked(signatures, awaited)
        if not self.hooks.sends or not signatures:
            return self._submit(signatures, groups, awaited, token=token, is_late=is_late)
        with self.sending(signatures) as signatures:
            self._submit(signatures, groups, awaited, token=token, is_late=is_late)

    def is_entered(self) -> bool:
        """Return whether this thread is in a call of the stores: see `Store.is_entered`."""
        stores = self._stores
        return self._lock.is_mine() if stores is None else stores.store.is_entered()

    def _submit_late(self, submission: Submission) -> None:
        signatures = [decode_signature(message.body) for message in submission.messages]
        self.check_asked(signatures)
        self._publish(submission, signatures, block=0.0)

    @contextlib.contextmanager
    def sending(self, signatures: Sequence[Signature[Any]]) -> Iterator[Sequence[Signature[Any]]]:
        """Give the signatures that are to be sent, between the halves of `around_send`."""
        with contextlib.ExitStack() as stack:
            for function in self.hooks.sends:
                headers = stack.enter_context(function(signatures))
                if headers:
                    signatures = [
                        one.replace(headers={**one.headers, **headers}) for one in signatures
                    ]
            yield signatures

    def _submit(
        self,
        signatures: Sequence[Signature[Any]],
        groups: Sequence[GroupMeta],
        awaited: Sequence[Signature[Any]],
        *,
        token: str,
        is_late: bool,
    ) -> None:
        out = self.outgoing(signatures, groups, awaited)
        if not out.messages:
            return
        submission = Submission(
            token=token or new_uuid(""),
            messages=out.messages,
            states=out.states,
            groups=out.groups,
            limits=self.limits_of(out.messages) if self.config.queue_limits else (),
        )
        if is_late:
            return self._late.put(submission)
        block = max(map(block_of, signatures)) if submission.limits else 0.0
        self._publish(submission, out.signatures, block=block)

    def _publish(
        self, submission: Submission, signatures: Sequence[Signature[Any]], *, block: float
    ) -> None:
        if HERE.get() is not None and (transaction := current(self)) is not None:
            return transaction.submit(submission)
        INSIDE.depth += 1
        try:
            self.patiently(lambda: self.store.submit(submission), block=block)
        except PublishRefused as error:
            queues = ", ".join(sorted({message.queue for message in submission.messages}))
            if error.permanent and queues not in str(error):
                error.args = (f"queue {queues}: {error}",)
            raise
        finally:
            INSIDE.depth -= 1
        if TaskSent in self.events.wanted:
            self.report_sent(signatures)

    def limits_of(self, messages: Sequence[Message]) -> list[QueueLimit]:
        """Return the limits of the queues that these messages come to now.

        Raises:
            QueueFull: they are more than a limit, so that there will never be room for them.
        """
        now, limits = self.now(), self.config.queue_limits
        adds = Counter(one.queue for one in messages if one.eta is None or one.eta <= now)
        found = [QueueLimit(one, limits[one], adds[one]) for one in adds if one in limits]
        for limit in found:
            limit.check(0)
        return found

    def check_asked(self, *batches: Sequence[Signature[Any]]) -> None:
        """Check what these calls ask of the stores: an order in groups, a life of their results.

        Raises:
            Unsupported: the broker keeps no such order; or the life is longer than the backend can.
        """
        for one in itertools.chain(*batches):
            if one.broker_message_group_id and not self.store.broker.features.message_groups:
                raise Unsupported(
                    f"{one.name}: broker_message_group_id={one.broker_message_group_id!r}: the "
                    f"broker {self.store.broker.features.name!r} keeps no order within groups "
                    '(in its place: options(exclusive="wait", exclusive_key=…))'
                )
        features, most = self.store.backend.features, self.config.results_expire_in
        for one in () if features.keeps_longer else itertools.chain(*batches):
            life = self.life_of(one)
            if life is not None and life > most:
                raise Unsupported(
                    f"{one.name}: result_expires={life:g} (the {features.name} backend keeps no "
                    f"result for longer than results_expire_in, {most} s)"
                )

    def life_of(self, signature: Signature[Any]) -> float | None:
        """Return the seconds that this call's end is kept; None: as the setting says."""
        task = self.registry.find(signature.name)
        settings = _PLAIN if task is None else task.settings
        headers = signature.headers
        return (settings_of_call(settings, headers) if headers else settings).result_expires

    def pending(self, signature: Signature[Any], now: dt.datetime) -> TaskState:
        """Return the state that a signature has when it is published."""
        headers = signature.headers
        is_plain = not headers or (len(headers) == 1 and HEADER_ROOT in headers)
        callbacks = signature.on_success or signature.on_error or signature.chord_callback
        return TaskState(
            task_uuid=signature.uuid,
            task_name=signature.name,
            state=State.PENDING,
            created_at=now,
            run=FIRST_RUN if is_plain else signature.run,
            attempt=FIRST_ATTEMPT if is_plain else signature.attempt,
            queue=signature.routing_key,
            eta=signature.eta,
            message=failing(signature) if callbacks or not is_plain else ALONE,
            keep_for=self.life_of(signature),
            root=signature.root if headers else "",
            parent="" if is_plain else signature.parent,
        )

    def report_sent(self, signatures: Sequence[Signature[Any]]) -> None:
        """Emit the events of signatures that have been published."""
        if TaskSent in self.events.wanted:
            for signature in signatures:
                self.events.emit(TaskSent(signature=signature))

    def patiently(self, publish: Callable[[], T], *, block: float = 0.0) -> T:
        """Repeat it while the store is away, up to `publish_timeout`; its token makes it safe.

        Args:
            block: seconds that it is repeated while a queue is full; not once a reply was lost,
                since a store forgets the token.
        """
        start = since = time.monotonic()
        pause = FIRST_PAUSE
        unknown: PublishUnknown | None = None
        failure: MachineryError
        while True:
            if RUNNING.get() is not None:
                check_time()
            end = since + self.config.publish_timeout - pause
            try:
                return publish()
            except PublishUnknown as error:
                if error.permanent:
                    raise
                unknown = failure = error
            except (BrokerUnavailable, BackendUnavailable) as error:
                failure = error
            except QueueFull as error:
                failure, room_by = error, start + (0.0 if error.permanent else block)
                end, since = (min(end, room_by), since) if unknown else (room_by, time.monotonic())
            except RuntimeError as error:
                if isinstance(error, MachineryError) or threading.main_thread().is_alive():
                    raise
                raise PublishRefused(
                    f"not sent: {error} (the interpreter is ending, and this store needs a thread: "
                    "make the first call of it before `atexit`)"
                ) from error
            left = end - time.monotonic()
            if left <= 0:
                # After a lost reply, a refusal of the repeat does not say that nothing was stored.
                raise unknown or failure
            time.sleep(min(full_jitter(pause), left))
            pause = min(1.0, pause * 2)

    def arrivals(self, arrived: Sequence[Arrived]) -> list[Arrival]:
        """Group arrivals as the stores keep them."""
        found: list[Arrival] = []
        for one in arrived:
            member, callback = one.member, one.member.chord_callback
            if callback is not None and member.group_uuid:
                try:
                    check_uuid(member.group_uuid, self.config.default_queue)
                except NameRefused as error:  # none was ever sent
                    logger.error("a member of a group that cannot be: %s", error)
                    continue
                found.append(
                    Arrival(
                        group_uuid=member.group_uuid,
                        task_uuid=member.uuid,
                        total=member.group_task_count,
                        ok=one.ok,
                        callback=self._encode_callback(
                            callback, self._inherited(callback, parent=member.group_uuid)
                        ),
                    )
                )
        return found

    def now(self) -> dt.datetime:
        """Return the moment by the store's clock, as it was last measured."""
        stores = self._stores
        if stores is None:
            if self._lock.is_mine():
                return self.clock.now()  # called on top of what opens the stores
            stores = self.stores
        return stores.clock.now()

    def moment(self) -> dt.datetime:
        """Return the moment from which a delay is counted; asks the store's clock at first."""
        if not self.is_entered() and isinstance(self.stores.clock, ServerClock):
            self.stores.clock.ask()
        return self.now()
