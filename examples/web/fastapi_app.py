"""Reports over HTTP with FastAPI: `uvicorn fastapi_app:app`."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, Field

from machinery_py import Server, StateNotFound
from reports import MAX_ROWS, report, server, shown
from streams import HEADERS, events


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    yield
    await server.close_async()


app = FastAPI(lifespan=lifespan)


def get_server() -> Server:
    return server  # a test puts another one here: app.dependency_overrides[get_server]


Tasks = Annotated[Server, Depends(get_server)]


class Order(BaseModel):
    rows: int = Field(ge=1, le=MAX_ROWS, strict=True)


@app.post("/reports", status_code=202)
async def order(order: Order, tasks: Tasks) -> dict[str, str]:
    result = await tasks.send_async(report.signature(order.rows))
    return {"id": result.uuid}


@app.get("/reports/{uuid}")
async def look(uuid: str, tasks: Tasks) -> dict[str, Any]:
    return shown(await tasks.result(uuid).get_state_async())


@app.get("/reports/{uuid}/events")
async def follow(uuid: str, tasks: Tasks) -> StreamingResponse:
    await look(uuid, tasks)  # 404 before the stream begins
    return StreamingResponse(events(tasks, uuid), headers=HEADERS, media_type="text/event-stream")


@app.get("/health")
async def health(tasks: Tasks) -> dict[str, int]:
    return {"workers": len(await tasks.inspect.workers_async())}


@app.exception_handler(RequestValidationError)
async def bad_input(_: Request, error: RequestValidationError) -> JSONResponse:
    # Not the input itself, as FastAPI would: it may be a number that JSON does not have.
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    return JSONResponse({"detail": f"{place}: {first['msg']}"}, 400)


@app.exception_handler(StateNotFound)
async def not_found(_: Request, error: StateNotFound) -> JSONResponse:
    return JSONResponse({"detail": "no such report"}, 404)


@app.exception_handler(ConnectionError)  # BrokerUnavailable, BackendUnavailable
async def unavailable(_: Request, error: ConnectionError) -> JSONResponse:
    return JSONResponse({"detail": "come back later"}, 503, {"Retry-After": "5"})
