"""The contract of a result backend: task states, groups, and the one-step changes of a settlement.

No store decides which state may follow which: each change goes through `states.advance`.
"""

from __future__ import annotations

import datetime as dt
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from machinery_py.backends.listings import COMPLETE, StateLister
from machinery_py.connections.durability import Concern
from machinery_py.errors import StateNotFound, Unsupported
from machinery_py.fences import NO_FENCE, Fence
from machinery_py.tasks.signature import Arg, RunNumber, Signature
from machinery_py.tasks.states import Arrival, GroupMeta, State, TaskState, size_of_state

# Seconds that a revocation is kept of a task whose message may still come.
REVOKED_LIFE = 3 * 86400.0
IDLE = 3600.0  # seconds until `tend` is called again where there is nothing to tend


class BackendFeatures(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Abilities of a backend. The rest is refused with Unsupported, in words."""

    name: str
    durable: bool = True
    shared: bool = True
    embedded: bool = False
    listing: bool = True  # states can be listed by name and state
    conditional: bool = True  # a change can depend on the epoch: no task completes twice
    keeps: bool = True  # False: the null backend
    keeps_unfinished: bool = True  # what is not finished does not expire
    keeps_longer: bool = True  # a call's result can be kept for longer than all others
    foreign: bool = False  # Go programs may change the states in it
    claims: bool = False  # it keeps the keys of unique tasks, and of retried workflows
    revocations: bool = True  # it keeps revocations; the worker of another one asks for none
    forgets: bool = False  # anything stored may be lost at any time: see its documentation
    schedules: bool = True  # it keeps records, which schedules are kept in
    riders: bool = True  # they change with settlements and firings, and not with submissions alone
    checkpoints: bool = False  # it keeps what the steps of tasks returned
    # Seconds that a group shared with Go is left to Go, since Go does not ask who has settled it.
    foreign_time: float = 0.0


class ReadyGroup(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A group whose callback is to be sent (all members are in) or failed (one member failed)."""

    group_uuid: str
    callback: bytes
    failed_member: str = ""


class Rider(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The change of a record that becomes true together with a `Change`, or refuses it.

    Of a change whose record holds something else nothing is written. So it may be repeated after a
    lost reply; the answer may then be CONFLICT though it was carried out.

    Attributes:
        expected: what the record must hold; None: there must be none.
        body: what it holds then; None: it is gone.
        life: 0: a record. Else a claim, which `claims` reads and which has a name of its own kind;
            it is forgotten that many seconds after its last change.
    """

    name: str
    expected: bytes | None
    body: bytes | None
    life: float = 0.0


class Change(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Changes that the backend makes as one step.

    Attributes:
        key: the task (or group) that the change belongs to.
        mark: names the delivery that makes the change; the same mark again is a repeat after a
            lost reply.
        epoch: from `Backend.begin`; refused when a later delivery has begun. 0: not checked.
        states: each goes through `advance`; the one that bears `key`, if any, decides whether the
            task was finished already.
        groups: created if they are not there.
        arrivals: members that are finished.
        fires: a group whose callback this change settles; refused if that was done before.
        outbox: messages still to be published, kept with the change until `clear_outbox`.
        force: states are written as they are, for a replay.
        riders: all that is above is written if each finds what it expects, and they with it.
    """

    key: str
    mark: str = ""
    epoch: Fence = NO_FENCE
    states: Sequence[TaskState] = ()
    groups: Sequence[GroupMeta] = ()
    arrivals: Sequence[Arrival] = ()
    fires: str = ""
    outbox: Sequence[bytes] = ()
    force: bool = False
    riders: Sequence[Rider] = ()


def size_of_change(change: Change) -> int:
    """Return about how many bytes a change takes, without encoding it."""
    size = sum(map(size_of_state, change.states)) + sum(map(len, change.outbox))
    size += sum(len(uuid) for group in change.groups for uuid in group.task_uuids)
    size += sum(len(arrival.callback) for arrival in change.arrivals)
    return size + sum(len(rider.body or b"") for rider in change.riders)


class Keeping(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Checkpoints that a running task wants to be kept: all of them, or none.

    Attributes:
        uuid: of the task.
        rows: name → content. A name is written once.
        mark, epoch: of the delivery, with two stores: refused when that has ended, or a later one
            has begun.
    """

    uuid: str
    rows: Mapping[str, bytes]
    mark: str = ""
    epoch: Fence = NO_FENCE


class Records(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The small records that the app keeps in a backend: its schedules.

    Attributes:
        now: the moment by the store's own clock.
        version: changes with every change of a record.
        bodies: name → record; None: the version is the one that the caller knows.
    """

    now: dt.datetime
    version: str
    bodies: Mapping[str, bytes] | None = None


def tick_key(name: str, token: str) -> str:
    """The key of what is sent with the change of a record. `token`: without a space."""
    return f"tick {name} {token}"


def sending_key(claim: str, token: str) -> str:
    """The key of what is sent with the change of a claim. `token`: without a space."""
    return f"unique {claim} {token}"


class Verdict(msgspec.Struct, frozen=True, gc=False):
    """Result of a settlement. Compare with SETTLED, ALREADY, FENCED and CONFLICT."""

    word: str


SETTLED = Verdict("settled")  #: it is true now
ALREADY = Verdict("already")  #: it was true before: our own repeat after a lost reply
FENCED = Verdict("fenced")  #: the lease was lost or the task is finished: nothing was written
CONFLICT = Verdict("conflict")  #: a rider met another record: nothing was written


class Begun(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How a delivery stands when it begins, on a backend that is not the broker's store.

    Attributes:
        epoch: to be handed in with the change that ends the delivery.
        finished: this run was settled before; only its outbox may be left to do.
    """

    epoch: Fence = NO_FENCE
    finished: bool = False
    outbox: Sequence[bytes] = ()


class Listener(ABC):
    """Tells a waiting thread that tasks may have finished.

    Owned by one thread, but `wake` and `watch` may be called from any.
    """

    @abstractmethod
    def watch(self, uuids: Iterable[str]) -> None:
        """Tell me about these as well."""

    @abstractmethod
    def unwatch(self, uuids: Iterable[str]) -> None:
        """I do not want to know any more."""

    @abstractmethod
    def wait(self, timeout: float) -> None:
        """Return once a watched task may have finished, or after `wake` or `timeout` seconds."""

    def told(self) -> Sequence[TaskState]:
        """Return final states that came with the news, each once; the others are to be read."""
        return ()

    @abstractmethod
    def wake(self) -> None:
        """Let a waiting `wait` return, or the next one. May be called from any thread."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back to the operating system. May be called twice."""


class OutboxBackend(ABC):
    """Outboxes and epochs, which let changes and another store's messages become true together.

    Needed only where broker and backend are two stores (protocol: stores/outbox.py). A backend that
    is always used with the broker of its own store does without. All methods may be called from any
    thread, and again after a lost reply: `begin` then takes one more epoch, which does no harm.
    """

    @abstractmethod
    def begin(self, keys: Sequence[tuple[str, RunNumber]]) -> list[Begun]:
        """Take the next epoch for deliveries of (task UUID, run).

        Called only when broker and backend are two stores.
        """

    @abstractmethod
    def outboxes(self, keys: Sequence[str]) -> list[Sequence[bytes]]:
        """Return the messages still to be published for each of these changes."""

    @abstractmethod
    def clear_outbox(self, sent: Sequence[tuple[str, Sequence[bytes]]]) -> None:
        """Forget these published outboxes. One that was written for a key since then stays."""

    @abstractmethod
    def unsent(
        self, limit: int, *, older_than: float, skip: int = 0
    ) -> list[tuple[str, Sequence[bytes]]]:
        """Return outboxes not cleared for that many seconds: their owner died between two stores.

        Args:
            skip: leave out so many of the first ones. The order is the same each time.
        """

    @abstractmethod
    def settled_by(self, uuids: Sequence[str]) -> list[str]:
        """The mark that last changed each task's state, or ""."""


class RecordKeeper:
    """Schedules, keys of unique tasks and revocations; every method refuses by default.

    `BackendFeatures.schedules`, `claims` and `revocations` say which of them a backend keeps. All
    methods may be called from any thread.
    """

    features: BackendFeatures

    def is_entered(self) -> bool:
        """Return whether this thread holds the store's lock, so that it must not call it again."""
        return False

    def records(self, known: str = "") -> Records:
        """All records; without their bodies if nothing has changed since the version `known`.

        Raises:
            Unsupported: this backend keeps none.
        """
        raise self._keeps_no("schedules")

    def claims(self, names: Sequence[str]) -> list[bytes | None]:
        """Return the content of each of these claims.

        Raises:
            Unsupported: this backend keeps none.
        """
        raise self._keeps_no("keys of unique tasks")

    def release(self, claims: Sequence[tuple[str, bytes]]) -> None:
        """Forget each claim that holds just this. Raises as `claims`.

        One that somebody changes at this moment may stay, until its life is over.
        """
        raise self._keeps_no("keys of unique tasks")

    def revoke(self, uuids: Sequence[str], life: float = REVOKED_LIFE) -> None:
        """Remember that these are not to be started, for so many seconds; the last call counts.

        0 forgets them, on some stores a second later.

        Raises:
            Unsupported: this backend keeps none.
        """
        raise self._keeps_no("revocations")

    def revoked(self, uuids: Sequence[str]) -> set[str]:
        """Return those of these tasks that have been revoked. Raises as `revoke`."""
        raise self._keeps_no("revocations")

    def checkpoints(self, uuid: str) -> dict[str, bytes]:
        """Return the checkpoints of a task: name → content.

        Raises:
            Unsupported: this backend keeps none.
        """
        raise self._keeps_no("checkpoints")

    def keep_checkpoints(self, keeping: Keeping) -> Verdict:
        """Keep them if the delivery is the task's last one and has not ended, in one step.

        Called only when broker and backend are two stores. Results as `Session.keep`; raises as
        `checkpoints`.
        """
        raise self._keeps_no("checkpoints")

    def fence_checkpoints(self, uuid: str, fence: Fence) -> None:
        """Let no delivery before this one keep checkpoints, if `keep` alone cannot be sure of it.

        Called before they are read by a delivery that is not the task's first.
        """

    def drop_checkpoints(self, uuid: str, names: Sequence[str]) -> None:
        """Delete these checkpoints of a task. Raises as `checkpoints`."""
        raise self._keeps_no("checkpoints")

    def end_checkpoints(self, uuid: str, life: float) -> None:
        """Forget the checkpoints of a task so many seconds from now, 0: at once; or earlier.

        A longer life than they have is given to them. Before that they are there as long as the
        task is, or its state. Raises as `checkpoints`.
        """
        raise self._keeps_no("checkpoints")

    def refuse_riders(self, changes: Sequence[Change]) -> None:
        """Raise Unsupported for riders, on a backend that keeps neither records nor claims."""
        for rider in [one for change in changes for one in change.riders]:
            raise self._keeps_no("keys of unique tasks" if rider.life else "schedules")

    def _keeps_no(self, what: str) -> Unsupported:
        return Unsupported(f"the {self.features.name} backend keeps no {what} ({COMPLETE})")


class Backend(RecordKeeper, StateLister, ABC):
    """Remembers how far each task is. Reads change nothing. Any thread may call any method."""

    @abstractmethod
    def apply(self, changes: Sequence[Change]) -> list[Verdict]:
        """Make the changes, each as one step.

        A change is FENCED when its epoch is old, when its group was fired before, or when `advance`
        drops the state of its key; if the same mark wrote that state, it is ALREADY instead. Else
        it is CONFLICT when a rider meets another record. What is not SETTLED writes nothing.

        Raises:
            Unsupported: this backend does not keep the records of a rider, or cannot change them
                together with all this (`lone_rider`).
        """

    def amend(self, rider: Rider) -> bool:
        """Change a record by itself; return whether it held what was expected."""
        return self.apply([Change(key="", riders=[rider])]) == [SETTLED]

    @abstractmethod
    def get_states(self, uuids: Sequence[str]) -> dict[str, TaskState]:
        """The states that there are."""

    @abstractmethod
    def get_group(self, group_uuid: str) -> GroupMeta | None:
        """Return the group's record; None if it was never made, is purged, or has expired."""

    @abstractmethod
    def ready_groups(self, limit: int) -> list[ReadyGroup]:
        """Groups whose callback is not settled yet.

        Any worker may settle it; `Change.fires` lets one through.
        """

    def partial_groups(self, limit: int) -> list[Arrival]:
        """Chords of which members of ours are in, while others have been missing for long.

        Go programs may have ended those without telling anybody. Each chord is given to one caller,
        and later again. The arrivals name no member.
        """
        del limit
        return []

    def drop_partial(self, group_uuids: Sequence[str]) -> None:
        """Forget groups that are settled or gone: `partial_groups` is not to give them again."""
        del group_uuids  # nothing is listed here

    def delete_finished(self, uuids: Sequence[str]) -> list[str]:
        """Forget those of these tasks that are finished, and return them.

        Results that a chord waits for stay. Raises as `list_states`.
        """
        over = [one for one in self.get_states(uuids).values() if one.is_finished]
        if over:
            self._delete_finished(over)
        # Looked at again, since the reply may have been lost.
        left = self.get_states([one.task_uuid for one in over])
        return [one.task_uuid for one in over if one.task_uuid not in left]

    def _delete_finished(self, states: Sequence[TaskState]) -> None:
        """Forget each that is finished still, and that no chord waits for."""
        raise self._unlisted()

    @abstractmethod
    def purge_state(self, task_uuid: str) -> None:
        """Forget the task's state. One that is not there is no error. (Go's PurgeState)"""

    @abstractmethod
    def purge_group_meta(self, group_uuid: str) -> None:
        """Forget the group, but not its members' states. (Go's PurgeGroupMeta)"""

    @abstractmethod
    def listener(self) -> Listener:
        """Return a new listener, which its caller closes."""

    def tend(self) -> float:
        """Forget what has expired. Returns the seconds after which it wants to be called again."""
        return IDLE

    def concerns(self) -> list[Concern]:
        """How its server could lose what it has stored; nothing if all is well."""
        return []

    def close(self) -> None:
        """Give everything back to the operating system. May be called twice."""

    # Go Machinery's names, written once for every store.

    def get_state(self, task_uuid: str) -> TaskState:
        """The task's state.

        Raises:
            StateNotFound: it expired, or it was never sent.
        """
        state = self.get_states([task_uuid]).get(task_uuid)
        if state is None:
            raise StateNotFound(task_uuid)
        return state

    def set_state_pending(self, signature: Signature[object]) -> None:
        """Write PENDING. As in all of Go's setters, an illegal step is dropped without an error."""
        self._set(signature, State.PENDING)

    def set_state_received(self, signature: Signature[object]) -> None:
        """Write RECEIVED; see `set_state_pending`."""
        self._set(signature, State.RECEIVED)

    def set_state_started(self, signature: Signature[object]) -> None:
        """Write STARTED; see `set_state_pending`."""
        self._set(signature, State.STARTED)

    def set_state_retry(self, signature: Signature[object]) -> None:
        """Write RETRY; see `set_state_pending`."""
        self._set(signature, State.RETRY)

    def set_state_success(self, signature: Signature[object], results: Sequence[Arg]) -> None:
        """Write SUCCESS with these results; see `set_state_pending`."""
        self._set(signature, State.SUCCESS, results=tuple(results))

    def set_state_failure(self, signature: Signature[object], error: str) -> None:
        """Write FAILURE with this error text; see `set_state_pending`."""
        self._set(signature, State.FAILURE, error=error)

    def _set(
        self,
        signature: Signature[object],
        state: State,
        results: Sequence[Arg] = (),
        error: str = "",
    ) -> None:
        change = TaskState(
            task_uuid=signature.uuid,
            task_name=signature.name,
            state=state,
            results=results,
            error=error,
            run=signature.run,
            attempt=signature.attempt,
            created_at=self.now(),
            queue=signature.routing_key,
        )
        self.apply([Change(key=signature.uuid, states=(change,))])

    def now(self) -> dt.datetime:
        """The moment by this backend's clock: its server's if it has one."""
        return dt.datetime.now(dt.timezone.utc)

    def init_group(self, group_uuid: str, task_uuids: Sequence[str]) -> None:
        """Make a group of these tasks; one that is there stays as it is. (Go's InitGroup)"""
        group = GroupMeta(
            group_uuid=group_uuid, task_uuids=tuple(task_uuids), created_at=self.now()
        )
        self.apply([Change(key=group_uuid, groups=(group,))])

    def group_task_states(self, group_uuid: str) -> list[TaskState]:
        """The states of the members, in the group's order.

        Raises:
            StateNotFound: there is no such group, or a member has no state (any more).
        """
        return self._of_members(group_uuid, self.member_states)

    def group_results(self, group_uuid: str) -> list[TaskState]:
        """As `group_task_states`, for a chord's callback: see `member_results`."""
        return self._of_members(group_uuid, self.member_results)

    def _of_members(
        self, group_uuid: str, read: Callable[[str, Sequence[str]], dict[str, TaskState]]
    ) -> list[TaskState]:
        group = self.get_group(group_uuid)
        if group is None:
            raise StateNotFound(group_uuid)
        states = read(group_uuid, group.task_uuids)
        for uuid in group.task_uuids:
            if uuid not in states:
                raise StateNotFound(uuid)
        return [states[uuid] for uuid in group.task_uuids]

    def member_states(self, group_uuid: str, uuids: Sequence[str]) -> dict[str, TaskState]:
        """As get_states, for a group's members: for the group a store may keep them longer."""
        return self.get_states(uuids)

    def member_results(self, group_uuid: str, uuids: Sequence[str]) -> dict[str, TaskState]:
        """As `member_states`; a store may read Go's fields alone of members that did not fail."""
        return self.member_states(group_uuid, uuids)

    def group_completed(self, group_uuid: str) -> bool:
        """Whether every member has ended in SUCCESS or FAILURE.

        Raises:
            StateNotFound: there is no such group.
        """
        group = self.get_group(group_uuid)
        if group is None:
            raise StateNotFound(group_uuid)
        states = self.get_states(group.task_uuids)
        return all(uuid in states and states[uuid].is_finished for uuid in group.task_uuids)

    def trigger_chord(self, group_uuid: str) -> bool:
        """True for exactly one caller: the one that is to send the callback."""
        return self.apply([Change(key=group_uuid, fires=group_uuid)]) == [SETTLED]


def lone_rider(changes: Sequence[Change], store: str) -> Rider | None:
    """Return the rider of these changes, for a store where the write to its record commits all.

    Raises:
        Unsupported: such a store cannot make this true as one step.
    """
    if not any(one.riders for one in changes):
        return None
    [change, *others] = changes
    if (
        others
        or len(change.riders) > 1
        or (change.mark or change.fires or change.arrivals or change.force)
        or any(state.task_uuid == change.key for state in change.states)  # it may be FENCED
    ):
        raise Unsupported(
            f"the {store} backend changes a record with what is sent, and with nothing else "
            "(name another result backend)"
        )
    return change.riders[0]


def outbox_of(backend: Backend) -> OutboxBackend:
    """Return the outbox of a backend that is used with the broker of another store.

    Raises:
        Unsupported: it has none.
    """
    if isinstance(backend, OutboxBackend):
        return backend
    raise Unsupported(
        f"the {backend.features.name} backend keeps no outbox: use it with the broker of the same "
        "store, or name another result backend"
    )
