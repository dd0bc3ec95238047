"""Calls that an outbox keeps: what its rows hold, and the results until they are published."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from machinery_py.backends.base import Backend
from machinery_py.brokers.base import Message
from machinery_py.registry.calls import needs_check
from machinery_py.registry.task import is_unique
from machinery_py.results.async_results import AsyncResult, ResultSource
from machinery_py.results.workflow_results import GroupResult, result_of
from machinery_py.tasks.signature import Chain, Signature, Step, new_uuid
from machinery_py.tasks.states import GroupMeta, TaskState
from machinery_py.tasks.workflow import Group
from machinery_py.unique import check_keys
from machinery_py.wire.long_chains import link_any

if TYPE_CHECKING:
    from machinery_py.server import Server


class Kept(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Content of a row: what one call of `send` publishes.

    Attributes:
        key: of the row, for the store.
        name, uuid: of the call, for people; of a group or chain those of its first task.
        is_unique: there is one message, and the store is to look at its key.
    """

    key: str
    name: str
    uuid: str
    messages: Sequence[Message]
    states: Sequence[TaskState] = ()
    groups: Sequence[GroupMeta] = ()
    is_unique: bool = False


class KeptStates:
    """A result backend for results: what was not published yet is PENDING there, not unknown."""

    def __init__(self, backend: Backend, states: dict[str, TaskState]) -> None:
        self._backend = backend
        self._states = states

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def get_states(self, uuids: Sequence[str]) -> dict[str, TaskState]:
        found = self._backend.get_states(uuids)
        for uuid in found:
            self._states.pop(uuid, None)  # later it may be gone because it expired
        return {uuid: self._states[uuid] for uuid in uuids if uuid in self._states} | found

    def get_state(self, task_uuid: str) -> TaskState:
        return self.get_states([task_uuid]).get(task_uuid) or self._backend.get_state(task_uuid)


class KeptSource:
    """The Server, as the results of a kept call see it."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.states: dict[str, TaskState] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    @property
    def backend(self) -> Backend:
        return cast("Backend", KeptStates(self._server.backend, self.states))


encode_kept: Final = msgspec.json.Encoder().encode
decode_kept: Final = msgspec.json.Decoder(Kept).decode


@contextmanager
def keeping(server: Server, step: Step[Any]) -> Iterator[tuple[Kept | None, Any]]:
    """Give what is to be kept of a call, and its result, between the halves of `around_send`.

    None: there is nothing to send, as of an empty group.

    Raises:
        ArgumentError, NameRefused, Unsupported, WorkflowError: as `Server.send`.
    """
    app, queue, source = server.app, server.config.default_queue, KeptSource(server)
    groups: Sequence[GroupMeta] = ()
    awaited: Sequence[Signature[Any]] = ()
    result: Any
    must_look = False
    if isinstance(step, Signature):
        if needs_check(step):
            step, groups = app.registry.linked(step, server.now())
        first: Sequence[Signature[Any]] = (step := step.with_uuid(),)
        must_look = is_unique(app.registry.find(step.name), step)
        if must_look:
            check_keys(server.backend, step.name)
        to = step.routing_key or queue
        result = AsyncResult(cast("ResultSource", source), step.uuid, name=step.name, queue=to)
    else:
        chain = Chain((step,)) if isinstance(step, Group) else cast("Chain[Any]", step)
        keeps = server.backend.features.keeps
        plan = link_any(chain, now=server.now(), are_kept=keeps, queue=queue)
        app.registry.check(plan.first)
        first, groups, awaited = plan.first, plan.groups, plan.awaited
        whole = result_of(plan, cast("ResultSource", source), queue)
        result = cast("GroupResult[Any]", whole.steps[0]) if isinstance(step, Group) else whole
    app.check_asked(first, awaited)
    if not first:
        yield None, result
        return
    with app.sending(first) as first:
        out = app.outgoing(first, groups, awaited)
        source.states.update((state.task_uuid, state) for state in out.states)
        top = out.messages[0]
        kept = Kept(
            key=new_uuid(""),
            name=top.name,
            uuid=top.uuid,
            messages=out.messages,
            states=out.states,
            groups=out.groups,
            is_unique=must_look,
        )
        yield kept, result
