"""Promises of every pair of stores about single tasks, also of `eager`.

Tests that need a worker in threads are in workers.py and messages.py, tests of workflows in
workflows.py.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import contextvars
import dataclasses
import datetime as dt
import decimal
import enum
import ipaddress
import math
import pathlib
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from machinery_py import (
    Arg,
    ArgumentError,
    Context,
    MachineryError,
    NoRetry,
    RetryTaskLater,
    Server,
    Signature,
    State,
    TaskFailed,
    current_task,
    group,
)
from machinery_py.testing.conformance.application import App
from machinery_py.testing.waiting import HANG, wait_until


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass(frozen=True)
class Parcel:
    city: str
    weights: list[float]


class Pair(enum.Enum):
    ONE = (1, 2)


@dataclasses.dataclass(frozen=True)
class Van:
    plate: str
    parcels: list[Parcel]


@dataclasses.dataclass(frozen=True)
class Ship:
    plate: str
    pair: Pair
    log: pathlib.Path | None = None


@dataclasses.dataclass(frozen=True)
class Twin:
    """Like a Parcel, field by field."""

    city: str
    weights: list[float]


VALUES: list[Any] = [
    0,
    -1,
    2**63 - 1,
    -(2**63),
    2**64 - 1,
    1.5,
    1e300,
    -0.0,
    "",
    "héllo \N{SNOWMAN} \0 \"'\\",
    True,
    False,
    [1, 2],
    [1.5],
    ["a", ""],
    [True],
    [],
    [1, "a", None, [2]],
    {},
    {"a": [1, {"b": None}]},
    None,
    b"",
    bytes(range(256)),
    dt.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=dt.timezone.utc),
    dt.date(2026, 1, 2),
    dt.timedelta(days=-1, microseconds=5),
    decimal.Decimal("1.10"),
    uuid.UUID(int=5),
    {"when": dt.date(2026, 1, 2), "price": [decimal.Decimal("9.90")]},
    dt.time(1, 2, 3, tzinfo=dt.timezone.utc),
    pathlib.Path("a/b"),
    ipaddress.ip_address("10.0.0.1"),
    collections.deque([1, None], 3),
    {decimal.Decimal("1.5"): {pathlib.PurePosixPath("a")}},
]


_seen: contextvars.ContextVar[int] = contextvars.ContextVar("seen", default=0)


class TaskConformance:
    """Single tasks. Subclasses provide the Server; one that needs no worker overrides `app`.

    A second Server in this process with the same URLs must open the same stores.
    """

    @pytest.fixture
    def server(self) -> Iterator[Server]:
        raise NotImplementedError("the subclass gives a fixture `server`")

    @pytest.fixture
    def idle(self, server: Server) -> Iterator[App]:
        """Return the application without a worker."""
        app = App(server)
        yield app
        app.close()

    @pytest.fixture
    def app(self, idle: App) -> Iterator[App]:
        """Return the application, with a worker in threads."""
        with idle.running():
            yield idle
            for gate in idle.gates.values():
                gate.set()

    # Arguments and results

    def test_context_variables_set_by_a_task_end_with_it(self, app: App) -> None:
        @app.server.task
        def sync() -> int:
            _seen.set(_seen.get() + 1)
            return _seen.get()

        @app.server.task
        async def coroutine() -> int:
            _seen.set(_seen.get() + 1)
            return _seen.get()

        results = [task.send() for _ in range(20) for task in (sync, coroutine)]
        assert {result.get(timeout=HANG) for result in results} == {1}
        assert _seen.get() == 0

    def test_members_of_unions_arrive_as_they_were_sent(self, app: App) -> None:
        @app.server.task
        def load(one: Van | Ship, *more: Van | Ship) -> list[Van | Ship]:
            app.calls.append((one, *more))
            return [one, *more]

        van, ship = Van("ULM 1", [Parcel("Bonn", [1.0])]), Ship("HH 2", Pair.ONE, pathlib.Path("a"))
        result = app.server.send(group(load.signature(van), load.signature(ship, van)))

        assert result.get(timeout=HANG) == [[van], [ship, van]]
        assert sorted(app.calls, key=len) == [(van,), (ship, van)]

    def test_what_an_annotation_cannot_rebuild_is_refused(self, app: App) -> None:
        @app.server.task
        def unclear(one: Parcel | Twin | None = None) -> Parcel | Twin:
            return Twin("Ulm", [])

        with pytest.raises(ArgumentError, match="it could be Parcel and Twin"):
            unclear.send(Twin("Ulm", []))
        result = unclear.send()
        with pytest.raises(ArgumentError, match="it could be Parcel and Twin"):
            result.get(timeout=HANG)
        assert result.get_state().state is State.SUCCESS  # its work is done

    def test_task_returns_its_result(self, app: App) -> None:
        result = app.add.send(1, 2)

        assert result.get(timeout=HANG) == 3
        assert result.touch() == 3
        assert result.is_finished()
        state = result.get_state()
        assert (state.state, state.task_name, state.attempt, state.error) == (
            State.SUCCESS,
            "add",
            1,
            "",
        )

    def test_values_are_passed_and_returned_unchanged(self, app: App) -> None:
        results = [app.echo.send(value) for value in VALUES]
        for value in VALUES:
            app.note.send(value)
        found = [result.get(timeout=HANG) for result in results]

        assert found == VALUES
        assert [type(one) for one in found] == [type(value) for value in VALUES]
        wait_until(lambda: len(app.calls) >= len(VALUES))
        # By their texts: 1 and True are equal, and workers share the tasks in any order.
        assert sorted(map(repr, app.calls)) == sorted(repr((value,)) for value in VALUES)

    def test_annotation_decides_the_type_of_an_argument(self, app: App) -> None:
        @app.server.task
        def ship(parcel: Parcel, colour: Colour, sizes: tuple[int, ...]) -> Parcel:
            app.calls.append((parcel, colour, sizes))
            return Parcel(parcel.city.upper(), parcel.weights)

        found = ship.send(Parcel("Ulm", [1.0]), Colour.RED, (1, 2)).get(timeout=HANG)

        assert found == Parcel("ULM", [1.0])
        assert app.calls == [(Parcel("Ulm", [1.0]), Colour.RED, (1, 2))]

    def test_keywords_reach_keyword_only_parameters(self, app: App) -> None:
        @app.server.task
        def welcome(email: str, *, lang: str = "en", tries: int) -> str:
            return f"{email} {lang} {tries}"

        assert welcome.send("a@b.c", tries=2).get(timeout=HANG) == "a@b.c en 2"
        assert welcome.send(email="a@b.c", tries=3, lang="fr").get(timeout=HANG) == "a@b.c fr 3"

    def test_tuple_is_several_results_and_none_is_no_result(self, app: App) -> None:
        several, nothing = app.pair.send("a", 1), app.note.send()

        assert several.get(timeout=HANG) == ("a", 1)
        assert [arg.value for arg in several.get_state().results] == ["a", 1]
        nothing.get(timeout=HANG)
        assert list(nothing.get_state().results) == []

    def test_argument_that_cannot_be_sent_is_refused_by_send(self, app: App) -> None:
        with pytest.raises(ArgumentError, match="echo argument 'value'"):
            app.echo.send(threading.Lock())
        with pytest.raises(ArgumentError, match="nan"):
            app.echo.send(math.nan)
        with pytest.raises(ArgumentError, match=r"64 bits|uint64"):
            app.add.send(2**64, 1)

    def test_result_that_cannot_be_stored_fails_its_task(self, app: App) -> None:
        def lock() -> object:
            return threading.Lock()

        app.server.register_task("lock", lock)
        with pytest.raises(TaskFailed, match="lock result: cannot send"):
            app.server.send_task(Signature.of("lock")).get(timeout=HANG)

    def test_signature_made_by_hand_is_run(self, app: App) -> None:
        by_hand: Signature[int] = Signature(
            name="add", args=[Arg(type="int64", value=1), Arg(type="int64", value=2)]
        )
        assert app.server.send_task(by_hand).get(timeout=HANG) == 3

    def test_ignored_result_is_not_stored(self, app: App) -> None:
        quiet = app.server.task("quiet", ignore_result=True)(lambda: 5)
        result = quiet.send()
        assert result.get(timeout=HANG) is None
        assert result.get_state().state is State.SUCCESS

    def test_coroutine_functions_are_run(self, app: App) -> None:
        results = [app.fetch.send(str(i)) for i in range(20)]
        assert [result.get(timeout=HANG) for result in results] == [f"fetch {i}" for i in range(20)]

    def test_results_can_be_awaited(self, app: App) -> None:
        async def use() -> list[int]:
            results = await asyncio.gather(*(app.add.send_async(i, i) for i in range(20)))
            return list(await asyncio.gather(*results))

        assert asyncio.run(use()) == [2 * i for i in range(20)]

    # Failures

    def test_failure_has_error_type_and_traceback(self, app: App) -> None:
        result = app.fail.send("no money")
        with pytest.raises(TaskFailed, match="no money") as caught:
            result.get(timeout=HANG)

        failure = caught.value
        assert (failure.uuid, failure.name, failure.error, failure.error_type) == (
            result.uuid,
            "fail",
            "no money",
            "ValueError",
        )
        assert "in _fail" in failure.traceback
        state = result.get_state()
        assert (state.state, list(state.results)) == (State.FAILURE, [])
        assert app.server.inspect.task(result.uuid).signature is not None

    def test_wrong_arguments_fail_without_a_retry(self, app: App) -> None:
        strict = app.server.task("strict", retries=5)(_strict)
        with pytest.raises(ArgumentError, match="strict: missing argument 'b'"):
            strict.send(1)  # type: ignore[call-arg]  # wrong on purpose
        with pytest.raises(ArgumentError, match="strict: missing argument 'b'"):
            strict.partial(1).send()
        with pytest.raises(ArgumentError, match="strict argument 'a': '1' is no int"):
            app.server.send_task(Signature.of("strict", "1", 2))
        # A sender that does not know the task cannot check it; the worker refuses without a retry.
        for args, text in (
            ((1,), "strict: missing argument 'b'"),
            (("1", 2), "strict argument 'a': '1' is no int"),
        ):
            by_hand = Signature.of("strict", *args).with_uuid().replace(retry_count=5)
            app.server.app.submit([by_hand])
            with pytest.raises(TaskFailed, match=text):
                app.server.result(by_hand.uuid).get(timeout=HANG)

    def test_system_exit_in_a_task_fails_that_task_only(self, app: App) -> None:
        def leave() -> None:
            raise SystemExit(3)

        app.server.register_task("leave", leave)
        with pytest.raises(TaskFailed, match="SystemExit"):
            app.server.send_task(Signature.of("leave")).get(timeout=HANG)
        assert app.add.send(1, 2).get(timeout=HANG) == 3

    # Callbacks

    def test_on_success_callback_gets_results_as_last_arguments(self, app: App) -> None:
        app.add.signature(1, 2).then(
            app.note.partial("first"), app.note.partial("second", "x")
        ).send()
        app.pair.signature("a", 1).then(app.note.partial("both")).send()
        app.wait_until_idle()
        assert sorted(app.calls) == [("both", "a", 1), ("first", 3), ("second", "x", 3)]

    def test_immutable_on_success_callback_gets_no_results(self, app: App) -> None:
        app.add.signature(1, 2).replace(immutable=True).then(app.note.partial("alone")).send()
        app.add.signature(1, 2).then(app.note.partial("given").replace(immutable=True)).send()
        app.wait_until_idle()
        assert sorted(app.calls) == [("alone",), ("given", 3)]

    def test_on_error_callback_gets_the_error_text_first(self, app: App) -> None:
        failing = app.fail.signature("no money").replace(immutable=True)
        failing.catch(app.note.partial("billing"), app.note.partial()).then(
            app.note.partial("success")
        ).send()
        app.wait_until_idle()
        assert sorted(app.calls) == [("fail", "no money"), ("no money",), ("no money", "billing")]

    def test_on_error_callback_is_sent_once_after_last_attempt(self, app: App) -> None:
        failing = app.server.task("failing", retries=2, backoff=[0.0])(app._fail)
        failing.signature("x").catch(app.note.partial("caught")).send()
        app.wait_until_idle()
        assert app.calls == [("fail", "x")] * 3 + [("x", "caught")]

    def test_callbacks_have_callbacks(self, app: App) -> None:
        last = app.note.partial("last")
        app.add.signature(1, 1).then(app.add.partial(1).then(app.add.partial(1).then(last))).send()
        app.fail.signature("x").catch(app.fail.partial().catch(last)).send()
        app.wait_until_idle()
        assert sorted(app.calls) == [("fail", "x"), ("fail", "x"), ("last", 4), ("x", "last")]

    # Retries

    def test_retry_keeps_the_uuid_and_counts_attempts(self, app: App) -> None:
        @app.server.task(retries=3, backoff=[0.0])
        def flaky() -> int:
            task = current_task()
            app.calls.append((task.uuid, task.attempt, task.retries_left))
            if task.attempt < 3:
                raise ConnectionError("away")
            return task.attempt

        result = flaky.send()
        assert result.get(timeout=HANG) == 3
        assert app.calls == [(result.uuid, 1, 3), (result.uuid, 2, 2), (result.uuid, 3, 1)]
        state = result.get_state()
        assert (state.state, state.attempt, state.run, state.error) == (State.SUCCESS, 3, 2, "")

    @pytest.mark.parametrize("kind", ["sync", "async"])
    def test_retry_gets_the_arguments_as_sent(self, app: App, kind: str) -> None:
        def spoil(ctx: Context, numbers: Any, mixed: Any, deep: dict[str, Any], dates: Any) -> None:
            app.calls.append((list(numbers), list(mixed), repr(deep), list(dates)))
            numbers.append(0)
            mixed.clear()
            deep["a"][0]["b"].append("more")
            dates.pop()
            assert [ctx.signature.args[index].value for index in (0, 1)] == [[1, 2], [1, "x"]]
            raise ConnectionError("away")

        async def spoil_async(
            ctx: Context, numbers: Any, mixed: Any, deep: dict[str, Any], dates: Any
        ) -> None:
            spoil(ctx, numbers, mixed, deep, dates)

        task = app.server.task("spoil", retries=2, backoff=[0.0])(
            spoil_async if kind == "async" else spoil
        )
        sent: tuple[Any, ...] = ([1, 2], [1, "x"], {"a": [{"b": []}]}, [dt.date(2026, 1, 2)])
        with pytest.raises(TaskFailed, match="away"):
            task.send(*sent).get(timeout=HANG)

        assert app.calls == [([1, 2], [1, "x"], repr(sent[2]), sent[3])] * 3

    def test_retries_end_in_a_failure(self, app: App) -> None:
        failing = app.server.task("failing", backoff=lambda n: 0.0)(app._fail)
        result = failing.options(retries=2).send("x")
        with pytest.raises(TaskFailed, match="x"):
            result.get(timeout=HANG)
        assert app.calls == [("fail", "x")] * 3
        assert result.get_state().attempt == 3

    def test_task_that_postpones_itself_uses_no_retry(self, app: App) -> None:
        @app.server.task(retries=1, backoff=[0.0])
        def busy(ctx: Context) -> int:
            app.calls.append((ctx.uuid, ctx.attempt, ctx.retries_left))
            if ctx.signature.run < 4:
                raise RetryTaskLater("busy", 0.0)
            return ctx.signature.run

        result = busy.send()
        assert result.get(timeout=HANG) == 4
        assert app.calls == [(result.uuid, 1, 1)] * 5

    def test_no_retry_error_fails_at_once(self, app: App) -> None:
        @app.server.task(retries=5, backoff=[0.0])
        def download(url: str) -> None:
            app.calls.append((url,))
            raise NoRetry(f"not a web address: {url}")

        with pytest.raises(TaskFailed, match="not a web address: ftp"):
            download.send("ftp").get(timeout=HANG)
        assert app.calls == [("ftp",)]

    def test_retry_on_decides_which_errors_are_retried(self, app: App) -> None:
        @app.server.task(retries=1, backoff=[0.0], retry_on=(ConnectionError, TimeoutError))
        def pick(kind: str) -> None:
            app.calls.append((kind,))
            raise ConnectionResetError(kind) if kind == "net" else ValueError(kind)

        for kind in ("net", "bug"):
            with pytest.raises(TaskFailed, match=kind):
                pick.send(kind).get(timeout=HANG)
        assert app.calls == [("net",), ("net",), ("bug",)]

    # Context and hooks

    def test_current_task_describes_the_running_task(self, app: App) -> None:
        @app.server.task
        def look(ctx: Context, value: int) -> list[Any]:
            same = current_task() is ctx
            return [
                same,
                ctx.uuid,
                ctx.name,
                ctx.queue,
                ctx.attempt,
                ctx.headers["tenant"],
                ctx.is_redelivery,
                value,
            ]

        result = look.options(headers={"tenant": "acme"}).send(5)
        assert result.get(timeout=HANG) == [
            True,
            result.uuid,
            "look",
            app.server.config.default_queue,
            1,
            "acme",
            False,
            5,
        ]

    def test_current_task_outside_a_task_is_none(self, app: App) -> None:
        assert app.add.send(1, 2).get(timeout=HANG) == 3
        with pytest.raises(MachineryError, match="outside a running task"):
            current_task()

    def test_task_can_send_tasks(self, app: App) -> None:
        @app.server.task
        def parent(count: int) -> list[str]:
            return [app.note.send(i).uuid for i in range(count)]

        uuids = parent.send(3).get(timeout=HANG)
        for one in uuids:
            app.server.result(one).get(timeout=HANG)
        assert sorted(app.calls) == [(0,), (1,), (2,)]

    def test_around_task_generators_wrap_each_task(self, app: App) -> None:
        calls = app.calls

        @app.server.around_task
        def outer(signature: Signature[object]) -> Iterator[None]:
            calls.append(("outer in", signature.name))
            yield
            calls.append(("outer out",))

        @app.server.around_task
        def inner(signature: Signature[object]) -> Iterator[None]:
            with contextlib.suppress(LookupError):
                calls.append(("inner in",))
                try:
                    yield
                except ValueError as error:
                    calls.append(("seen", str(error)))
                    raise
                calls.append(("inner out",))

        app.note.send("run").get(timeout=HANG)
        assert calls == [
            ("outer in", "note"),
            ("inner in",),
            ("run",),
            ("inner out",),
            ("outer out",),
        ]
        calls.clear()
        with pytest.raises(TaskFailed, match="broken"):
            app.fail.send("broken").get(timeout=HANG)
        assert calls == [
            ("outer in", "fail"),
            ("inner in",),
            ("fail", "broken"),
            ("seen", "broken"),
        ]

    def test_publish_handler_sees_and_changes_every_signature(self, app: App) -> None:
        @app.server.set_pre_publish_handler
        def stamp(signature: Signature[Any]) -> Signature[Any]:
            return signature.with_headers(tenant="acme")

        @app.server.task
        def tenant(*_: Any) -> None:
            app.calls.append((current_task().headers["tenant"],))

        tenant.signature().then(tenant.partial()).send()
        app.wait_until_idle()
        assert app.calls == [("acme",)] * 2


def _strict(a: int, b: int) -> int:
    return a + b
