"""Sending when a database transaction is committed."""

from __future__ import annotations

from typing import Any, TypeVar, overload

from django.db import transaction

from machinery_py.contrib.django.project import server
from machinery_py.results.async_results import AsyncResult
from machinery_py.tasks.signature import Chain, Signature, Step
from machinery_py.tasks.workflow import Group

R = TypeVar("R")


@overload
def send_on_commit(step: Signature[R], using: str | None = None) -> AsyncResult[R]: ...
@overload
def send_on_commit(step: Chain[Any] | Group[Any], using: str | None = None) -> None: ...
def send_on_commit(step: Step[Any], using: str | None = None) -> AsyncResult[Any] | None:
    """Send a call when the current transaction is committed; without one, at once.

    After a rollback nothing is sent. A process that ends between commit and sending sends nothing.

    Args:
        step: a signature, whose arguments were checked when it was made; or a chain, group, chord.
        using: alias of the database whose transaction it is; by default that of Django.

    Returns:
        Of a signature, its result, which has its UUID now and a state from the commit on. A unique
        task whose key is held then is not sent, and this result stays without a state.

    Raises:
        PublishRefused, PublishUnknown: as `server.send`; from the end of `atomic`, when the data is
            committed. Callbacks of the transaction that come after it are not called.
    """
    if isinstance(step, Signature):
        step = step.with_uuid()
    transaction.on_commit(lambda: server.send(step), using=using)
    if not isinstance(step, Signature):
        return None
    queue = step.routing_key or server.config.default_queue
    return AsyncResult(server, step.uuid, name=step.name, queue=queue)
