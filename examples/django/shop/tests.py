"""Tests of the shop: `python manage.py test`."""

from django.db import connection, transaction

from machinery_py.contrib.django import send_on_commit
from machinery_py.contrib.django.outbox import outbox
from machinery_py.contrib.django.testing import TaskTestCase, WorkerTestCase
from shop.models import Order, Receipt
from shop.tasks import count_receipts, write_receipt


class Orders(TaskTestCase):
    def test_an_order_is_followed_by_its_receipt(self) -> None:
        with self.committed():
            uuid = self.client.get("/order/tea").json()["task"]
            self.machinery.assert_not_sent("write_receipt")  # not before the commit

        self.assertEqual(Receipt.objects.get().text, "one tea, with thanks")
        answer = self.client.get(f"/receipt/{uuid}").json()
        self.assertEqual(answer, {"text": "one tea, with thanks"})

    def test_an_order_that_is_rolled_back_sends_nothing(self) -> None:
        with self.committed(), transaction.atomic():
            send_on_commit(write_receipt.signature(Order.objects.create(item="tea").id))
            transaction.set_rollback(True)

        self.machinery.assert_not_sent("write_receipt")

    def test_a_call_in_the_outbox_follows_the_fate_of_its_order(self) -> None:
        with transaction.atomic():
            outbox.send(write_receipt.signature(Order.objects.create(item="tea").id))
            transaction.set_rollback(True)
        self.client.get("/order-for-sure/coffee")
        self.machinery.assert_not_sent("write_receipt")

        outbox.publish()  # as a relay does
        self.machinery.drain()

        self.assertEqual(Receipt.objects.get().text, "one coffee, with thanks")

    def test_a_task_of_coroutines_sees_the_rows_of_the_test(self) -> None:
        Receipt.objects.create(order=Order.objects.create(item="tea"), text="one tea")

        result = count_receipts.send()
        self.machinery.drain()

        self.assertEqual(result.get(timeout=0), 1)


class OrdersWithAWorker(WorkerTestCase):
    def test_a_worker_sees_the_committed_order(self) -> None:
        with transaction.atomic():
            row = Order.objects.create(item="tea")
            result = send_on_commit(write_receipt.signature(row.id))

        self.assertEqual(result.get(timeout=30), "one tea, with thanks")
        self.assertEqual(count_receipts.send().get(timeout=30), 1)

    def test_without_a_transaction_it_is_sent_at_once(self) -> None:
        row = Order.objects.create(item="tea")
        self.assertFalse(connection.in_atomic_block)

        result = send_on_commit(write_receipt.signature(row.id))

        self.assertEqual(result.get(timeout=30), "one tea, with thanks")
