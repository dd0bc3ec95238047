"""Tests of the letters: `python manage.py test`, on Django 6."""

from functools import partial

from django.db import transaction
from django.tasks import TaskResultStatus
from shop.models import Order

from letters.tasks import count_orders, write_letter
from machinery_py.contrib.django import server
from machinery_py.contrib.django.testing import TaskTestCase, WorkerTestCase


class Letters(TaskTestCase):
    def test_a_letter_follows_the_commit_of_its_order(self) -> None:
        order = Order.objects.create(item="tea")
        with self.committed():
            transaction.on_commit(partial(write_letter.enqueue, order.id))
            self.machinery.assert_not_sent("letters.tasks.write_letter")

        (sent,) = self.machinery.sent
        result = write_letter.get_result(sent.uuid)
        self.assertEqual(result.return_value, "Your tea is on its way.")


class LettersWithAWorker(WorkerTestCase):
    def test_async_task_sees_committed_orders(self) -> None:
        Order.objects.create(item="tea")

        result = count_orders.enqueue()
        server.result(result.id).get(timeout=30)

        result.refresh()
        self.assertEqual(result.status, TaskResultStatus.SUCCESSFUL)
        self.assertEqual(result.return_value, {"orders": 1, "attempt": 1})
