"""The body of an order. Starlette, Litestar and Flask read it with msgspec, which is installed."""

from typing import Annotated

import msgspec

from reports import MAX_ROWS


class Order(msgspec.Struct):
    rows: Annotated[int, msgspec.Meta(ge=1, le=MAX_ROWS)]


class BadOrder(ValueError):
    """The body is no order."""


def read_order(body: bytes) -> Order:
    """Return the order in a JSON body.

    Raises:
        BadOrder: it is none; the text is for the client.
    """
    try:
        return msgspec.json.decode(body, type=Order)
    except (msgspec.MsgspecError, ValueError) as error:
        raise BadOrder(str(error)) from None
    except RecursionError:
        raise BadOrder("too deep") from None
