"""Tasks of Django's own kind, which Django 6 has: any backend can run them."""

from django.tasks import TaskContext, task
from shop.models import Order


@task(queue_name="letters")
def write_letter(order_id: int) -> str:
    order = Order.objects.get(id=order_id)
    return f"Your {order.item} is on its way."


@task(takes_context=True)
async def count_orders(context: TaskContext) -> dict[str, int]:
    return {"orders": await Order.objects.acount(), "attempt": context.attempt}
