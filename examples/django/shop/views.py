"""Order something, and ask for the receipt."""

from django.db import transaction
from django.http import HttpRequest, JsonResponse

from machinery_py import ResultExpired
from machinery_py.contrib.django import send_on_commit, server
from shop.models import Order
from shop.tasks import write_receipt


def order(request: HttpRequest, item: str) -> JsonResponse:
    with transaction.atomic():
        row = Order.objects.create(item=item)
        result = send_on_commit(write_receipt.signature(row.id))
    return JsonResponse({"task": result.uuid}, status=202)


def receipt(request: HttpRequest, uuid: str) -> JsonResponse:
    try:
        text = server.result(uuid).touch()
    except ResultExpired:
        text = None  # too old; or in an outbox, and not published yet
    return JsonResponse({"text": text})
