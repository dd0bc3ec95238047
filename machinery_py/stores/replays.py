"""Replays on two stores: the states first, then the messages.

A failed task's message is in its state, which a replay writes over. So the new states are written
in one step with an outbox that holds the messages, under the UUID of the first task. It is cleared
when the messages are published; if their sender dies before, `tend` publishes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from machinery_py.backends.base import Backend, Change
from machinery_py.stores.base import Submission

_pack = msgspec.json.Encoder().encode


def replace_states(backend: Backend, submission: Submission) -> set[str]:
    """Write the states of a replay and its outbox; return its tasks."""
    key, bodies = outbox_of_replay(submission)
    states = sorted(submission.states, key=lambda one: one.task_uuid != key)  # its own first
    mark = f"submit {submission.token}"
    groups = submission.groups
    backend.apply(
        [Change(key=key, mark=mark, states=states, groups=groups, force=True, outbox=bodies)]
    )
    return {one.task_uuid for one in states}


def outbox_of_replay(submission: Submission) -> tuple[str, Sequence[bytes]]:
    """Return the outbox of a replay: its key, and the messages."""
    messages = submission.messages
    key = messages[0].uuid if messages else f"submit {submission.token}"
    return key, [_pack(one) for one in messages]
