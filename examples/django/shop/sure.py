"""Order with an outbox: no end of this process can lose the call."""

from django.db import transaction
from django.http import HttpRequest, JsonResponse

from machinery_py.contrib.django.outbox import outbox
from shop.models import Order
from shop.tasks import write_receipt


def order_for_sure(request: HttpRequest, item: str) -> JsonResponse:
    with transaction.atomic():
        row = Order.objects.create(item=item)
        result = outbox.send(write_receipt.signature(row.id))
    return JsonResponse({"task": result.uuid}, status=202)
