"""Test cases whose tasks run in memory: no broker, no result backend, no worker process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from django.test import TestCase, TransactionTestCase

from machinery_py.contrib.django.project import server
from machinery_py.testing import Harness
from machinery_py.testing.harness import running_worker
from machinery_py.worker.worker import Worker


class TaskTestCase(TestCase):
    """Django's TestCase. Tasks run in its thread and its transaction, when the test says so.

    Attributes:
        machinery: the Harness: `drain`, `advance`, `assert_sent`, `state`.
    """

    machinery: Harness

    def setUp(self) -> None:
        super().setUp()
        self.machinery = self.enterContext(Harness(server))

    @contextlib.contextmanager
    def committed(self, using: str = "default") -> Iterator[None]:
        """At the end of the block, call what waits for its commit, and run the tasks that are due.

        What a task leaves for its own commit is called after it, and the tasks of that run, too.

        Raises:
            TaskFailed: a task failed for good.
        """
        with self.captureOnCommitCallbacks(using=using, execute=True):
            yield
        called: list[object] = [None]
        while called:
            with self.captureOnCommitCallbacks(using=using, execute=True) as called:
                self.machinery.drain()


class WorkerTestCase(TransactionTestCase):
    """Django's TransactionTestCase, with a worker in threads of this process.

    Its transactions are real ones: a worker's threads could not see the data of a TestCase.
    """

    worker: Worker

    def setUp(self) -> None:
        super().setUp()
        self.worker = self.enterContext(running_worker(server))
