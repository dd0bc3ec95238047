"""Promises of every pair of stores about illegal names.

An illegal name is refused at the call, and makes a message a dead letter.

Names are keys in the stores. No name in a message may stop other messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from machinery_py import Signature, State, TaskFailed
from machinery_py.brokers.base import Message
from machinery_py.errors import NameRefused
from machinery_py.testing.conformance.application import App
from machinery_py.testing.conformance.tasks import TaskConformance
from machinery_py.testing.waiting import HANG, wait_until

UNSAFE = ("a\nb", "a\r\nb", "\0", "\x7f", "x" * 256, "\u00fc" * 128)
KEYS = (
    "delayed_tasks",
    "TriggerChordMutex",
    "machinery_lock_app",
    "mpy:revoked",
    "mpy:queues",
    "mpy:{machinery_tasks}:n",
)
QUEUES = (
    *UNSAFE,
    *KEYS,
    "amq.topic",
    "machinery.workers",
    "machinery.dead.mail",
    "machinery.results.outbox",
    "task_1a2b3c4d-0000-4000-8000-1a2b3c4d5e6f",
)
UUIDS = (*UNSAFE, *KEYS, "machinery_tasks")
ODD = (
    "a b",
    "a/b:c*[d]",
    "{tag}",
    "\u00fc-\u4e2d\u6587",
    "'\"\\\\",
    "%",
    "group_1",
    "amq.topic",
    "machinery.workers",
    "x" * 255,
)


class NameConformance(TaskConformance):
    """Illegal names, and odd but legal ones."""

    def test_illegal_name_is_refused_at_the_call(self, idle: App) -> None:
        for queue in QUEUES:
            with pytest.raises(NameRefused, match="queue"):
                idle.add.options(queue=queue)
        for uuid in UUIDS:
            with pytest.raises(NameRefused, match="UUID"):
                idle.add.options(uuid=uuid)
        for signature in _bad_signatures(idle):
            with pytest.raises(NameRefused):
                idle.server.send(signature)
        for name in UNSAFE:
            with pytest.raises(NameRefused, match="lock"):
                idle.server.lock(name)
            with pytest.raises(NameRefused, match="task"):
                idle.server.register_task(name, len)

        with idle.running():
            assert idle.add.send(1, 2).get(timeout=HANG) == 3
        assert sum(one.waiting + one.delayed for one in idle.server.inspect.queues()) == 0

    def test_message_with_an_illegal_name_becomes_a_dead_letter(self, app: App) -> None:
        queue = app.server.config.default_queue
        bodies = [
            *(_body(UUID=uuid) for uuid in UUIDS),
            *(_body(RoutingKey=name) for name in QUEUES),
            *(_body(GroupUUID=uuid, GroupTaskCount=1) for uuid in UUIDS),
            *(_body(Name=name) for name in UNSAFE),
            _body(UUID=queue),
        ]
        app.server.broker.put(
            [Message(uuid="", name="", queue=queue, body=body) for body in bodies], token=""
        )

        wait_until(
            lambda: len(app.server.inspect.dead(limit=len(bodies) + 1)) == len(bodies),
            what="dead letters",
        )
        letters = app.server.inspect.dead(limit=len(bodies))
        assert {letter.reason for letter in letters} == {"bad-name"}
        assert sorted(letter.body for letter in letters) == sorted(bodies)
        assert app.add.send(1, 2).get(timeout=HANG) == 3
        app.wait_until_idle()

    def test_callback_with_an_illegal_queue_fails_alone(self, app: App) -> None:
        queue, names = (
            app.server.config.default_queue,
            ("delayed_tasks", "mpy:revoked", "amq.topic", "a\nb"),
        )
        bodies = [
            _body(
                UUID=f"bad_{number}",
                OnSuccess=[json.loads(_body(UUID=f"then_{number}", RoutingKey=name))],
            )
            for number, name in enumerate(names)
        ]
        app.server.broker.put(
            [Message(uuid="", name="", queue=queue, body=body) for body in bodies], token=""
        )

        for number, name in enumerate(names):
            app.wait_for_state(f"bad_{number}", State.FAILURE)
            with pytest.raises(TaskFailed) as caught:
                app.server.result(f"bad_{number}").get(timeout=HANG)
            assert f"queue {name!r}" in caught.value.error
        assert app.add.send(1, 2).get(timeout=HANG) == 3
        app.wait_until_idle()

    def test_odd_but_legal_names_work(self, app: App) -> None:
        results = [app.add.options(uuid=uuid).send(1, 2) for uuid in ODD]
        assert [result.get(timeout=HANG) for result in results] == [3] * len(ODD)
        assert [result.get_state().state for result in results] == [State.SUCCESS] * len(ODD)
        assert app.server.inspect.dead() == []


def _bad_signatures(app: App) -> Iterator[Signature[Any]]:
    good, bad = app.add.signature(1, 2), Signature.of("note").replace(routing_key="delayed_tasks")
    yield bad
    yield good.replace(uuid="delayed_tasks")
    yield good.replace(uuid="mail", routing_key="mail")
    yield good.replace(uuid="group_1", group_uuid="group_1")
    yield good.replace(group_uuid="machinery_tasks")
    yield good.then(bad)
    yield good.catch(app.note.partial().then(bad))
    yield good.replace(group_uuid="group_1", chord_callback=bad)


def _body(**fields: object) -> bytes:
    arguments = [{"Type": "int64", "Value": 1}, {"Type": "int64", "Value": 2}]
    return json.dumps({"UUID": "", "Name": "add", "Args": arguments, **fields}).encode()
