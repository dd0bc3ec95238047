"""Reports over HTTP with Starlette: `uvicorn starlette_app:app`."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypedDict

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from bodies import BadOrder, read_order
from machinery_py import Server, StateNotFound
from reports import report, server, shown
from streams import HEADERS, events


class Shared(TypedDict):
    """`request.state`."""

    tasks: Server


@asynccontextmanager
async def lifespan(_: Starlette) -> AsyncIterator[Shared]:
    yield {"tasks": server}
    await server.close_async()


async def order(request: Request) -> JSONResponse:
    order = read_order(await request.body())
    result = await request.state.tasks.send_async(report.signature(order.rows))
    return JSONResponse({"id": result.uuid}, 202)


async def look(request: Request) -> JSONResponse:
    result = request.state.tasks.result(request.path_params["uuid"])
    return JSONResponse(shown(await result.get_state_async()))


async def follow(request: Request) -> StreamingResponse:
    await look(request)  # 404 before the stream begins
    changes = events(request.state.tasks, request.path_params["uuid"])
    return StreamingResponse(changes, headers=HEADERS, media_type="text/event-stream")


async def health(request: Request) -> JSONResponse:
    return JSONResponse({"workers": len(await request.state.tasks.inspect.workers_async())})


async def bad_input(_: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"detail": str(error)}, 400)


async def not_found(_: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"detail": "no such report"}, 404)


async def unavailable(_: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"detail": "come back later"}, 503, {"Retry-After": "5"})


app = Starlette(
    lifespan=lifespan,
    routes=[
        Route("/reports", order, methods=["POST"]),
        Route("/reports/{uuid}", look),
        Route("/reports/{uuid}/events", follow),
        Route("/health", health),
    ],
    exception_handlers={
        BadOrder: bad_input,
        StateNotFound: not_found,
        ConnectionError: unavailable,  # BrokerUnavailable, BackendUnavailable
    },
)
