"""The Python half: a Server with the tasks of peer/tasks.go, under the same names."""

from __future__ import annotations

import collections
import threading
from typing import Annotated, Any

from machinery_py import Config, Context, RetryTaskLater, Server, Signature
from machinery_py.tasks.signature import Arg

#: Every type that an argument or a result may have (go-machinery 3.1).
SCALARS = (
    "bool",
    "string",
    "int",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float32",
    "float64",
)
TYPES = (*SCALARS, *(f"[]{name}" for name in SCALARS), "[]byte")


def new_server(url: str, *, backend: str = "", **options: Any) -> Server:
    """A server whose tasks are those of the Go worker."""
    server = Server(Config(broker=url, result_backend=backend or url, **options))
    _register_echoes(server)
    _register_arithmetic(server)
    _register_troubles(server)
    return server


def _register_echoes(server: Server) -> None:
    for name in TYPES:
        server.register_task(f"echo_{name}", _echo(name))


def _echo(name: str) -> Any:
    inner = {"bool": bool, "string": str, "float32": float, "float64": float}
    if name == "[]byte":
        kind: Any = bytes
    elif name.startswith("[]"):
        kind = list[inner.get(name[2:], int)]  # type: ignore[misc]
    else:
        kind = inner.get(name, int)

    def echo(value: Any) -> Any:
        return value

    echo.__annotations__ = {"value": Annotated[kind, name], "return": Annotated[kind, name]}
    return echo


def _register_arithmetic(server: Server) -> None:
    @server.task("add")
    def add(a: int, b: int) -> int:
        return a + b

    @server.task("mul")
    def mul(a: int, b: int) -> int:
        return a * b

    @server.task("total")
    def total(*parts: int) -> int:
        return sum(parts)

    @server.task("pair")
    def pair(a: int, b: str) -> tuple[int, str]:
        return a + 1, b + "!"

    @server.task("none")
    def none() -> None:
        return None

    @server.task("where")
    def where() -> str:
        return "python"

    @server.task("hold")
    def hold() -> str:
        return "python"

    @server.task("python_only")
    def python_only(text: str) -> str:
        return f"python:{text}"


def _register_troubles(server: Server) -> None:
    lock = threading.Lock()
    failures: collections.Counter[str] = collections.Counter()

    @server.task("fail")
    def fail(text: str) -> None:
        raise RuntimeError(text)

    @server.task("crash")
    def crash(text: str) -> None:
        raise BaseException(text)  # as rude as a Go panic

    @server.task("caught")
    def caught(text: str) -> str:
        return f"python caught {text}"

    @server.task("caught_with")
    def caught_with(text: str, more: str) -> str:
        return f"python caught {text} with {more}"

    @server.task("flaky")
    def flaky(key: str, times: int) -> int:
        with lock:
            failures[key] += 1
            if failures[key] <= times:
                raise RuntimeError(f"failure {failures[key]}")
            return failures[key]

    @server.task("later")
    def later(key: str, milliseconds: int) -> str:
        with lock:
            failures[key] += 1
            if failures[key] == 1:
                raise RetryTaskLater("not yet", milliseconds / 1000)
            return "python at last"

    @server.task("header")
    def header(context: Context, key: str) -> str:
        return context.headers.get(key, "")


def call(name: str, *args: tuple[str, object], **fields: Any) -> Signature[Any]:
    """A signature with explicit types: `call("add", ("int64", 1), ("int64", 2))`."""
    return Signature(
        name=name, args=tuple(Arg(type=kind, value=value) for kind, value in args), **fields
    )


def message(signature: Signature[Any]) -> dict[str, Any]:
    """What the Go peer is told to send."""
    import json

    from machinery_py.wire.signatures import encode_signature

    found: dict[str, Any] = json.loads(encode_signature(signature))
    return found
