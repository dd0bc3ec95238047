"""Reports over HTTP with Litestar: `uvicorn litestar_app:app`."""

from typing import Any

from litestar import Litestar, Request, Response, get, post
from litestar.di import Provide
from litestar.response import Stream

from bodies import BadOrder, read_order
from machinery_py import Server, StateNotFound
from reports import report, server, shown
from streams import HEADERS, events


@post("/reports", status_code=202)
async def order(body: bytes, tasks: Server) -> dict[str, str]:
    order = read_order(body)  # `data: Order` answers 500 to a body that is nested too deeply
    result = await tasks.send_async(report.signature(order.rows))
    return {"id": result.uuid}


@get("/reports/{uuid:str}")
async def look(uuid: str, tasks: Server) -> dict[str, Any]:
    return shown(await tasks.result(uuid).get_state_async())


@get("/reports/{uuid:str}/events")
async def follow(uuid: str, tasks: Server) -> Stream:
    shown(await tasks.result(uuid).get_state_async())  # 404 before the stream begins
    return Stream(events(tasks, uuid), headers=HEADERS, media_type="text/event-stream")


@get("/health")
async def health(tasks: Server) -> dict[str, int]:
    return {"workers": len(await tasks.inspect.workers_async())}


def bad_input(_: Request[Any, Any, Any], error: BadOrder) -> Response[dict[str, str]]:
    return Response({"detail": str(error)}, status_code=400)


def not_found(_: Request[Any, Any, Any], error: StateNotFound) -> Response[dict[str, str]]:
    return Response({"detail": "no such report"}, status_code=404)


def unavailable(_: Request[Any, Any, Any], error: ConnectionError) -> Response[dict[str, str]]:
    return Response({"detail": "come back later"}, status_code=503, headers={"Retry-After": "5"})


def get_server() -> Server:
    return server


app = Litestar(
    route_handlers=[order, look, follow, health],
    dependencies={"tasks": Provide(get_server, sync_to_thread=False)},
    on_shutdown=[server.close_async],
    exception_handlers={
        BadOrder: bad_input,
        StateNotFound: not_found,
        ConnectionError: unavailable,  # BrokerUnavailable, BackendUnavailable
    },
)
