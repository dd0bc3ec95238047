"""Tasks of the shop; found by the app `machinery_py.contrib.django`."""

from machinery_py.contrib.django import server
from shop.models import Order, Receipt


@server.task
def write_receipt(order_id: int) -> str:
    order = Order.objects.get(id=order_id)
    text = f"one {order.item}, with thanks"
    # The task may run twice: the second run finds the first one's row.
    Receipt.objects.get_or_create(order=order, defaults={"text": text})
    return text


@server.task
async def count_receipts() -> int:
    return int(await Receipt.objects.acount())
