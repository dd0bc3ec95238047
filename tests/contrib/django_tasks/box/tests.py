"""What Django promises of a backend, with a worker in threads; run by test_django_tasks.py."""

import asyncio
import contextlib
import datetime as dt
import io
import json
import os
from typing import Any
from zoneinfo import ZoneInfo

from asgiref.sync import sync_to_async
from django.conf import settings
from django.contrib.auth.models import User
from django.core.management import call_command
from django.db import transaction
from django.tasks import TaskResultStatus, default_task_backend, task, task_backends
from django.tasks.exceptions import InvalidTask, TaskResultDoesNotExist, TaskResultMismatch
from django.tasks.signals import task_enqueued, task_finished, task_started
from django.test import SimpleTestCase, TestCase, override_settings
from django.utils import timezone

from box import tasks
from machinery_py import Server
from machinery_py.contrib.django import MachineryBackend, server
from machinery_py.contrib.django.backend import server_of_alias
from machinery_py.contrib.django.project import config_of
from machinery_py.contrib.django.testing import TaskTestCase, WorkerTestCase
from machinery_py.errors import ConfigError
from machinery_py.testing.waiting import wait_until

GUARD = 30.0
BACKEND = "machinery_py.contrib.django.MachineryBackend"
BERLIN = ZoneInfo("Europe/Berlin")


def ended(result: Any) -> Any:
    def is_finished() -> bool:
        result.refresh()
        return bool(result.is_finished)

    wait_until(is_finished, GUARD, f"the end of {result.task.name}")
    return result


class Validation(SimpleTestCase):
    def test_alias_of_task_is_this_backend(self) -> None:
        self.assertIsInstance(task_backends["default"], MachineryBackend)
        self.assertEqual(default_task_backend.alias, "default")
        self.assertIs(task_backends["default"].server, server)
        self.assertIs(task_backends["narrow"].server, server)
        self.assertIsNot(task_backends["apart"].server, server)
        for flag in ("defer", "async_task", "get_result", "priority"):
            self.assertTrue(getattr(default_task_backend, f"supports_{flag}"))

    def test_task_that_cannot_be_run_is_refused_when_it_is_made(self) -> None:
        def inner() -> None: ...

        with self.assertRaisesMessage(InvalidTask, "module level"):
            task(inner)
        with self.assertRaisesMessage(InvalidTask, "Queue 'nowhere' is not valid"):
            tasks.echo.using(queue_name="nowhere")
        for priority in (101, -101, 0.5):
            with self.assertRaisesMessage(InvalidTask, "whole number"):
                tasks.echo.using(priority=priority)
        with self.assertRaisesMessage(InvalidTask, "aware datetime"):
            tasks.echo.using(run_after=dt.datetime(2030, 1, 1))
        with self.assertRaisesMessage(InvalidTask, "argument of 'context'"):
            task(takes_context=True)(tasks.echo.func)

    def test_tasks_of_other_backends_are_known_to_workers(self) -> None:
        self.assertTrue(server.is_task_registered("box.tasks.elsewhere"))
        self.assertTrue(task_backends["apart"].server.is_task_registered("box.tasks.elsewhere"))

    def test_workers_know_the_queues_of_tasks_that_they_are_for(self) -> None:
        def queue(name: str) -> Any:
            return server.get_registered_task(f"box.tasks.{name}").settings.queue

        self.assertEqual((queue("second_time"), queue("echo")), ("narrow", ""))
        self.assertEqual(queue("elsewhere"), "")  # another backend has that queue

    def test_priorities_are_as_many_as_queues_of_rabbitmq_have(self) -> None:
        urls = {"broker": "amqp://localhost", "result_backend": "memory://"}
        for amqp, most in (({}, 0), ({"queue_declare_args": {"x-max-priority": 10}}, 10)):
            other = MachineryBackend("default", {})
            other.server = Server(config_of({**urls, "amqp": amqp}))
            self.assertEqual(other.supports_priority, most > 0)
            self.assertEqual(other._most, most)
        self.assertEqual(default_task_backend._most, 200)


class Sending(TaskTestCase):
    def test_priority_queue_and_delay_are_those_of_the_message(self) -> None:
        after = timezone.now() + dt.timedelta(hours=1)
        for priority in (-100, 0, 100):
            tasks.echo.using(priority=priority, queue_name="mail", run_after=after).enqueue()
        tasks.echo.enqueue()

        sent = self.machinery.sent
        self.assertEqual([one.priority for one in sent], [0, 100, 200, 100])
        self.assertEqual([one.routing_key for one in sent], ["mail"] * 3 + ["machinery_tasks"])
        self.assertEqual([one.eta for one in sent], [after] * 3 + [None])

    def test_task_runs_after_its_moment(self) -> None:
        after = self.machinery.clock.now() + dt.timedelta(hours=1)
        result = tasks.echo.using(run_after=after).enqueue(1)

        self.machinery.drain()
        result.refresh()
        self.assertEqual(result.status, TaskResultStatus.READY)
        self.machinery.advance(hours=1)
        self.machinery.drain()

        result.refresh()
        self.assertEqual(result.return_value, [[1], {}])
        self.assertEqual(result.task.run_after, after)
        self.assertEqual(tasks.echo.get_result(result.id).task.run_after, after)

    def test_naive_moments_are_in_the_default_zone(self) -> None:
        # The night of 2030-03-31 has no 02:30 in Berlin; 24 hours of the clock on the wall are 23.
        before = dt.datetime(2030, 3, 30, 12)
        with self.settings(USE_TZ=False):
            tasks.echo.using(run_after=before).enqueue()
            result = tasks.echo.using(run_after=before + dt.timedelta(days=1)).enqueue()
            self.assertTrue(timezone.is_naive(result.enqueued_at))
            result.refresh()
            self.assertTrue(timezone.is_naive(result.enqueued_at))

        first, second = (one.eta for one in self.machinery.sent)
        self.assertEqual(first, before.replace(tzinfo=BERLIN))
        self.assertEqual(second - first, dt.timedelta(hours=23))

    def test_arguments_are_those_of_their_json(self) -> None:
        result = tasks.echo.enqueue((1, 2.0, b"x"), key={1: (2,)})

        self.assertEqual(result.args, [[1, 2.0, "x"]])
        self.assertEqual(result.kwargs, {"key": {"1": [2]}})
        self.machinery.drain()
        found = tasks.echo.get_result(result.id)
        self.assertEqual((found.args, found.kwargs), (result.args, result.kwargs))
        self.assertEqual(found.return_value, [[[1, 2.0, "x"]], {"key": {"1": [2]}}])
        with self.assertRaisesMessage(TypeError, "Unsupported type"):
            tasks.echo.enqueue(object())
        self.assertEqual(len(self.machinery.sent), 1)

    def test_results_of_others_are_not_there(self) -> None:
        result = tasks.echo.enqueue()
        other = tasks.second_time.enqueue()

        with self.assertRaises(TaskResultMismatch):
            tasks.fail.get_result(result.id)
        plain = server.get_registered_task("box.tasks.echo").send({})
        for unknown in ("", "123", 123, None, "a b", plain.uuid, other.id):
            with self.assertRaises(TaskResultDoesNotExist):
                default_task_backend.get_result(unknown)

    def test_task_in_a_rolled_back_transaction_is_sent(self) -> None:
        with transaction.atomic():
            result = tasks.echo.enqueue()
            transaction.set_rollback(True)

        self.assertIsNotNone(result.enqueued_at)
        self.assertEqual(len(self.machinery.sent), 1)

    def test_task_of_another_backend_is_sent_by_using(self) -> None:
        result = tasks.elsewhere.using(backend="default", queue_name="mail").enqueue()
        self.machinery.drain()

        result.refresh()
        self.assertEqual(result.return_value, "ran")

    def test_retried_task_keeps_its_errors_and_workers(self) -> None:
        result = tasks.second_time.enqueue()
        self.machinery.drain()
        result.refresh()
        self.assertEqual(result.status, TaskResultStatus.READY)
        self.assertEqual([one.exception_class for one in result.errors], [OSError])

        self.machinery.advance(minutes=1)
        self.machinery.drain()

        result.refresh()
        self.assertEqual((result.return_value, result.attempts), (2, 2))
        self.assertEqual([one.exception_class for one in result.errors], [OSError])
        self.assertLessEqual(result.started_at, result.last_attempted_at)

    def test_revoked_task_has_failed(self) -> None:
        result = tasks.echo.enqueue()
        server.revoke(result.id)
        self.machinery.drain(raise_failures=False)

        result.refresh()
        self.assertEqual((result.status, result.attempts), (TaskResultStatus.FAILED, 0))
        self.assertEqual(result.errors[0].exception_class.__name__, "TaskFailed")


class Running(WorkerTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.seen: list[tuple[str, str, str]] = []

        def note(name: str) -> Any:
            def receive(sender: type, task_result: Any, **_: Any) -> None:
                assert sender is MachineryBackend
                self.seen.append((name, task_result.id, str(task_result.status)))

            return receive

        for name, signal in (
            ("enqueued", task_enqueued),
            ("started", task_started),
            ("finished", task_finished),
        ):
            receiver = note(name)
            signal.connect(receiver, weak=False)
            self.addCleanup(signal.disconnect, receiver)

    def told(self, result: Any, *statuses: str) -> None:
        wanted = [
            (name, result.id, status)
            for name, status in zip(("enqueued", "started", "finished"), statuses, strict=True)
        ]
        wait_until(lambda: len(self.seen) >= len(wanted), GUARD, "the signals")
        self.assertEqual(self.seen, wanted)

    def test_result_tells_of_success(self) -> None:
        result = tasks.echo.enqueue(1, two=3)
        self.assertEqual(result.status, TaskResultStatus.READY)
        self.assertEqual(result.attempts, 0)
        with self.assertRaisesMessage(ValueError, "not finished yet"):
            _ = result.return_value

        ended(result)

        self.assertEqual(result.status, TaskResultStatus.SUCCESSFUL)
        self.assertEqual(result.return_value, [[1], {"two": 3}])
        self.assertEqual((result.attempts, result.errors), (1, []))
        self.assertEqual(result.worker_ids, [self.worker.name])
        self.assertEqual(result.started_at, result.last_attempted_at)
        self.assertLessEqual(result.started_at, result.finished_at)
        found = tasks.echo.get_result(result.id)
        self.assertEqual(found, result)
        self.told(result, "READY", "RUNNING", "SUCCESSFUL")

    async def test_coroutines_send_and_ask_for_async_tasks(self) -> None:
        result = await tasks.echo_async.aenqueue(1, two=3)
        await asyncio.to_thread(ended, result)

        self.assertEqual(result.return_value, [[1], {"two": 3}])
        found = await tasks.echo_async.aget_result(result.id)
        self.assertEqual(found, result)
        await asyncio.to_thread(self.told, result, "READY", "RUNNING", "SUCCESSFUL")

    def test_result_tells_of_failure(self) -> None:
        with self.assertLogs("django.tasks", "ERROR") as logs:
            result = ended(tasks.fail.enqueue())
            self.told(result, "READY", "RUNNING", "FAILED")

        self.assertEqual(result.status, TaskResultStatus.FAILED)
        with self.assertRaisesMessage(ValueError, "Task failed"):
            _ = result.return_value
        (error,) = result.errors
        self.assertIs(error.exception_class, ValueError)
        self.assertTrue(error.traceback.endswith("ValueError: no stamp\n"), error.traceback)
        self.assertEqual(result.attempts, 1)
        self.assertIn("no stamp", logs.output[0])

    def test_what_is_no_json_fails_its_task(self) -> None:
        with self.assertLogs("django.tasks", "ERROR"):
            result = ended(tasks.give_object.enqueue())
            self.told(result, "READY", "RUNNING", "FAILED")

        self.assertIs(result.errors[0].exception_class, TypeError)

    def test_exit_in_a_task_is_its_failure(self) -> None:
        result = ended(tasks.exit_all.enqueue())

        self.assertEqual(result.status, TaskResultStatus.FAILED)
        self.assertIs(result.errors[0].exception_class, SystemExit)

    def test_context_knows_the_call(self) -> None:
        result = tasks.describe.using(priority=7, queue_name="mail").enqueue("hi")

        ended(result)

        told = result.return_value
        self.assertEqual(told.pop("id"), result.id)
        self.assertEqual(
            told,
            {
                "word": "hi",
                "status": "RUNNING",
                "attempt": 1,
                "args": ["hi"],
                "priority": 7,
                "queue": "mail",
                "errors": [],
            },
        )

    def test_running_task_is_seen_running(self) -> None:
        self.addCleanup(tasks.gate.set)
        result = tasks.wait.enqueue()

        def is_running() -> bool:
            result.refresh()
            return bool(result.status == TaskResultStatus.RUNNING)

        wait_until(is_running, GUARD, "RUNNING")
        self.assertIsNone(result.finished_at)
        self.assertIsNotNone(result.started_at)
        self.assertEqual(result.attempts, 1)
        tasks.gate.set()
        ended(result)


class Settings(SimpleTestCase):
    def test_overridden_settings_take_effect_and_end(self) -> None:
        default_queue = server.config.default_queue
        other = {"url": "memory://other", "default_queue": "other"}

        with self.settings(MACHINERY=other):
            inner = tasks.echo.enqueue()
            self.assertEqual(server.broker.pending("other", 10)[0].uuid, inner.id)
            inner.refresh()

        self.assertEqual(server.config.default_queue, default_queue)
        with self.assertRaises(TaskResultDoesNotExist):
            inner.refresh()
        self.assertEqual(server.config.worker_queues, {default_queue: 1, "mail": 1, "narrow": 1})

    def test_without_settings_of_its_own_the_server_has_those_of_tasks(self) -> None:
        options = {"url": "memory://tasks", "default_queue": "of_tasks"}
        with override_settings(TASKS={"default": {"BACKEND": BACKEND, "OPTIONS": options}}):
            self.assertNotEqual(server.config.default_queue, "of_tasks")
            with override_settings():
                del settings.MACHINERY
                with self.settings(TASKS=settings.TASKS):  # tells of it, as `del` does not
                    self.assertEqual(server.config.default_queue, "of_tasks")
                    self.assertIs(task_backends["default"].server, server)

    def test_wrong_setting_is_refused_and_changes_nothing(self) -> None:
        before = server.config
        with self.assertRaisesMessage(ConfigError, "settings.MACHINERY: broker URL"):
            override_settings(MACHINERY={"url": "reddis://host"}).enable()

        self.assertEqual(server.config, before)

    def test_alias_of_another_backend_has_no_server(self) -> None:
        with self.assertRaisesMessage(ConfigError, "there is default, narrow, apart"):
            server_of_alias("dummy")

    def test_command_has_the_server_of_another_alias(self) -> None:
        self.addCleanup(os.environ.pop, "DJANGO_MACHINERY_BACKEND", None)
        tasks.echo.using(backend="apart").enqueue()
        out = io.StringIO()

        with contextlib.redirect_stdout(out):
            call_command("machinery", "queues", "--backend", "apart", "--json")

        (queue,) = json.loads(out.getvalue())
        self.assertEqual(queue["waiting"], 1)


class Admin(TestCase):
    def test_dashboard_is_linked_for_those_who_may_see_the_admin(self) -> None:
        link = '<a href="/tasks/?a&amp;b"'
        with self.settings(MACHINERY={"url": "memory://box", "dashboard_url": "/tasks/?a&b"}):
            self.assertEqual(self.client.get("/admin/login/").context["available_apps"], [])
            self.client.force_login(User.objects.create_superuser("ada"))
            self.assertContains(self.client.get("/admin/"), link)
            self.assertNotContains(self.client.get("/admin/auth/"), 'model-dashboard"')

        self.assertNotContains(self.client.get("/admin/"), link)


class InTransactions(TaskTestCase):
    def test_what_a_task_sends_on_its_commit_is_run_as_well(self) -> None:
        with self.committed():
            transaction.on_commit(tasks.pass_on.enqueue)

        self.assertEqual(
            [one.name for one in self.machinery.sent], ["box.tasks.pass_on", "box.tasks.echo"]
        )
        self.assertEqual(list(self.machinery.results.values())[1], [[], {}])

    async def test_coroutines_share_the_transaction_of_the_test(self) -> None:
        await User.objects.acreate(username="ada")
        result = await tasks.name_users.aenqueue()

        await sync_to_async(self.machinery.drain)()

        await result.arefresh()
        self.assertEqual(result.return_value, ["ada"])

    def test_settings_overridden_in_a_harness_leave_its_stores(self) -> None:
        with self.settings(MACHINERY={"url": "memory://other"}):
            result = tasks.echo.enqueue(1)
        self.machinery.drain()

        result.refresh()
        self.assertEqual(result.return_value, [[1], {}])
