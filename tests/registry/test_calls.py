"""Tasks by their names, and the way from a Python call to Args and back."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import functools
import inspect
import sys
import threading
import types
from collections.abc import Sequence
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machinery_py import ArgumentError, Context, Server, Signature, Task
from machinery_py.errors import TaskAlreadyRegistered, TaskNotRegistered
from machinery_py.registry.calls import Call
from machinery_py.registry.task import AsyncTask
from machinery_py.tasks.signature import (
    HEADER_DELAY,
    HEADER_EXPIRES,
    HEADER_EXPIRES_IN,
    Arg,
    counted,
)
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.waiting import HANG, together
from machinery_py.wire.signatures import decode_signature, encode_signature


@dataclasses.dataclass
class Parcel:
    city: str
    weight: float = 1.0


class Size(enum.IntEnum):
    SMALL = 1


def plain(a: int, b: int = 5, *more: int) -> int:
    return a + b + sum(more)


def keywords(a: str, /, b: str = "b", *, c: str, d: str = "d") -> None: ...
def anything(*args: Any, **kwargs: Any) -> None: ...
def with_context(ctx: Context, a: int) -> None: ...
def context_not_first(a: int, ctx: Context) -> None: ...
def typed(  # type: ignore[empty-body]
    parcel: Parcel, size: Size, when: dt.datetime | None = None, items: tuple[int, ...] = ()
) -> Parcel: ...
def unknown_names(a: NoSuchName, b: int) -> None: ...  # type: ignore[name-defined]  # noqa: F821
def untyped(a, b=2): ...  # type: ignore[no-untyped-def]
async def coroutine(a: int) -> int: ...  # type: ignore[empty-body]


def sent(function: Any, *args: Any, **kwargs: Any) -> list[tuple[str, str, Any]]:
    return [
        (arg.name, arg.type, arg.value) for arg in Call("task", function).arguments(args, kwargs)
    ]


def received(function: Any, *args: Any, **kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
    """What the function would be called with after a journey over the wire."""
    call = Call("task", function)
    signature = Signature[Any](name="task", args=call.arguments(args, kwargs))
    return call.values(decode_signature(encode_signature(signature)).args)


# Binding


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "expected"),
    [
        (plain, (1,), {}, [("", "int64", 1)]),
        (plain, (1, 2, 3, 4), {}, [("", "int64", n) for n in (1, 2, 3, 4)]),
        (plain, (), {"b": 1, "a": 2}, [("", "int64", 2), ("", "int64", 1)]),
        (plain, (1,), {"b": 2}, [("", "int64", 1), ("", "int64", 2)]),
        (keywords, ("x",), {"c": "y"}, [("", "string", "x"), ("c", "string", "y")]),
        (
            keywords,
            ("x", "z"),
            {"d": "w", "c": "y"},
            [("", "string", "x"), ("", "string", "z"), ("c", "string", "y"), ("d", "string", "w")],
        ),
        (anything, (1,), {"k": True}, [("", "int64", 1), ("k", "bool", True)]),
        (with_context, (5,), {}, [("", "int64", 5)]),
        (with_context, (), {"a": 5}, [("", "int64", 5)]),
        (untyped, (1, None), {}, [("", "int64", 1), ("", "json", None)]),
        (str.upper, ("x",), {}, [("", "string", "x")]),
    ],
)
def test_only_keyword_only_arguments_travel_by_name(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], expected: list[Any]
) -> None:
    assert sent(function, *args, **kwargs) == expected


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "text"),
    [
        (plain, (), {}, "task: missing argument 'a'"),
        (with_context, (), {}, "task: missing argument 'a'"),
        (with_context, (1, 2), {}, "task: too many positional arguments"),
        (keywords, ("x",), {}, "task: missing argument 'c'"),
        (keywords, ("x",), {"c": "y", "e": 1}, "task: got an unexpected keyword argument 'e'"),
        (keywords, (), {"a": "x", "c": "y"}, "'a'"),
        (plain, (1,), {"a": 1}, "task: multiple values for argument 'a'"),
    ],
)
def test_a_call_that_does_not_fit_is_told(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], text: str
) -> None:
    with pytest.raises(ArgumentError) as caught:
        sent(function, *args, **kwargs)
    assert text in str(caught.value)


def test_a_partial_call_leaves_room_at_the_end() -> None:
    def three(a: int, b: int, c: int = 0) -> None: ...

    call = Call("task", three)
    assert call.arguments((), {}, partial=True) == ()
    assert [arg.value for arg in call.arguments((1,), {}, partial=True)] == [1]
    assert [arg.value for arg in call.arguments((), {"a": 1}, partial=True)] == [1]
    with pytest.raises(ArgumentError, match="argument 'b' leaves 'a' open before it"):
        call.arguments((), {"b": 1}, partial=True)
    with pytest.raises(ArgumentError, match="unexpected"):
        call.arguments((), {"z": 1}, partial=True)


def test_a_hole_in_front_of_an_argument_gets_its_default() -> None:
    def three(a: int, b: int = 7, c: int = 0) -> None: ...

    assert sent(three, 1, c=2) == [("", "int64", 1), ("", "int64", 7), ("", "int64", 2)]


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value", [nested(201), nested(100_000), {(1, 2): 3}], ids=["201", "100000", "tuple-key"]
)
def test_value_that_cannot_be_read_back_is_refused_with_its_name(value: Any) -> None:
    def f(first: Any, second: Any) -> Any: ...

    call = Call("f", f)
    with pytest.raises(ArgumentError, match=r"^f argument 'second': cannot send "):
        call.arguments((1, value), {})
    with pytest.raises(ArgumentError, match=r"^f result: cannot send "):
        call.results(value)
    with pytest.raises(ArgumentError, match=r"^f argument 2: cannot send "):
        encode_signature(
            Signature(name="f", args=(Arg(type="int64", value=1), Arg(type="json", value=value)))
        )


def test_unsendable_value_is_refused_with_its_argument() -> None:
    with pytest.raises(ArgumentError, match=r"task argument 'b': cannot send <object>"):
        sent(plain, 1, object())
    with pytest.raises(ArgumentError, match=r"task argument 'a': cannot send"):
        sent(plain, 2**64)


# What an annotation rules out


def hints(  # type: ignore[no-untyped-def]
    whole: int = 0,
    text: str = "",
    truth: bool = False,
    number: float = 0.0,
    raw: bytes = b"",
    maybe: int | None = None,
    late: int = None,  # noqa: RUF013
    either: int | str = 0,
    many: list[int] = [],  # noqa: B006
    row: Sequence[str] = (),
    table: dict[str, Any] = {},  # noqa: B006
    any: Any = None,
    open=None,
    parcel: Parcel | None = None,
    small: Annotated[int, "int32"] = 0,
    *rest: int,
    named: str = "",
): ...


FITTING: dict[str, list[Any]] = {
    "whole": [1, True, Size.SMALL, 2**64 - 1],
    "text": ["", "x"],
    "truth": [True],
    "number": [1.5, 1, True],
    "raw": [b"", bytearray(b"x")],
    "maybe": [1, None],
    "late": [1, None],
    "either": [1, "x"],
    "many": [[], [1], (1, 2), [True]],
    "row": [["a"], ("a",), [], "ab"],
    "table": [{}, {"a": 1}],
    "any": [None, "x", [1]],
    "open": [None, "x", 1.5],
    "parcel": [None, Parcel("Ulm")],
    "small": [7],
    "named": ["x"],
}
WRONG: dict[str, list[Any]] = {
    "whole": ["2", 2.0, None, [1], b"1"],
    "text": [1, None, b"x", ["x"]],
    "truth": [1, "true", None],
    "number": ["1.5", None, [1.0]],
    "raw": ["x", None],
    "maybe": ["x", 1.5],
    "late": ["x"],
    "either": [1.5, None, [1]],
    "many": ["x", [1, "x"], ["x"], [1.5], {1: 2}, None],
    "row": [[1], 5, None],
    "table": [[], None, "x"],
    "parcel": ["x", {"city": 5}],
    "small": ["x", 1.5],
    "named": [1, None],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in FITTING.items() for value in values]
)
def test_annotated_value_is_sent_and_received(name: str, value: Any) -> None:
    received(hints, **{name: value})


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_value_against_its_annotation_is_refused_on_both_sides(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=f"task argument '{name}'"):
        sent(hints, **{name: value})

    place = list(inspect.signature(hints).parameters).index(name) if name != "named" else 0
    before = Call("task", hints).arguments(DEFAULTS[:place], {})
    by_hand: Signature[Any] = Signature(
        name="task", args=[*before, Arg.of(value, name="named" if name == "named" else "")]
    )
    with pytest.raises(ArgumentError, match=f"task argument '{name}'"):
        Call("task", hints).values(decode_signature(encode_signature(by_hand)).args)
    with pytest.raises(ArgumentError, match=f"task argument '{name}'"):
        Call("task", hints).check(by_hand.args)


DEFAULTS: tuple[Any, ...] = (0, "", False, 0.0, b"", None, None, 0, [], (), {}, None, None, None, 0)


@pytest.mark.parametrize("kind", ["int", "int8", "int32", "uint64", "uint"])
def test_every_integer_of_go_is_an_int(kind: str) -> None:
    assert Call("task", hints).values([Arg(type=kind, value=7)]) == ([7], {})
    assert Call("task", hints).values(
        [*Call("task", hints).arguments(DEFAULTS[:8], {}), Arg(type=f"[]{kind}", value=[7])]
    )
    with pytest.raises(ArgumentError, match="task argument 'text': 7 is no str"):
        Call("task", hints).values([Arg(type="int64", value=7), Arg(type=kind, value=7)])


@pytest.mark.parametrize("name", ["[]uint8", "[]byte"])
def test_the_bytes_of_go_may_be_called_a_list(name: str) -> None:
    def take(numbers: Annotated[list[int], "[]uint8"]) -> None: ...

    assert received(take, [1, 2]) == received(take, b"\1\2") == ([b"\1\2"], {})
    by_go = decode_signature(
        encode_signature(Signature(name="task", args=[Arg(type=name, value=b"\1\2")]))
    )
    assert Call("task", take).values(by_go.args) == ([b"\1\2"], {})
    with pytest.raises(ArgumentError, match="'numbers'"):
        sent(take, "x")


def test_the_rest_is_held_against_its_annotation_as_well() -> None:
    assert received(plain, 1, 2, 3)
    with pytest.raises(ArgumentError, match="task argument 'more': 'x' is no int"):
        sent(plain, 1, 2, 3, "x")


def test_partial_call_is_not_checked_against_parameters() -> None:
    # An error callback gets the error text first: the given arguments fill later parameters.
    assert [arg.value for arg in Call("task", keywords).arguments((5,), {}, partial=True)] == [5]


# On the other side


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (plain, (1, 2, 3), {}),
        (keywords, ("x",), {"c": "y"}),
        (anything, (1, "a"), {"k": [1]}),
        (untyped, (1, None), {}),
        (typed, (Parcel("Ulm"), Size.SMALL), {}),
        (
            typed,
            (
                Parcel("Ulm", 2.5),
                Size.SMALL,
                dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc),
                (1, 2),
            ),
            {},
        ),
        (unknown_names, ("a", 1), {}),
    ],
)
def test_function_gets_the_arguments_that_were_sent(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    values, named = received(function, *args, **kwargs)
    assert (tuple(values), named) == (args, kwargs)


def test_annotations_bring_types_back() -> None:
    values, _ = received(typed, Parcel("Ulm", 2.5), Size.SMALL, None, (1,))
    assert [type(value) for value in values] == [Parcel, Size, type(None), tuple]


def test_names_of_go_senders_count_for_keyword_parameters_only() -> None:
    call = Call("task", keywords)
    args = [
        Arg(type="string", value="x", name="whatever"),
        Arg(type="string", value="z", name="b"),
        Arg(type="string", value="y", name="c"),
    ]
    assert call.values(args) == (["x", "z"], {"c": "y"})


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ([], "task: missing argument 'a'"),
        ([Arg(type="int64", value=1)] * 3, "task: too many positional arguments"),
        (
            [Arg(type="nosuch", value=1)],
            "Reflect task args error: nosuch is not one of supported types",
        ),
    ],
)
def test_wrong_args_from_the_wire_are_told(args: list[Arg], text: str) -> None:
    def two(a: int, b: int = 2) -> None: ...

    with pytest.raises(ArgumentError) as caught:
        Call("task", two).values(args)
    assert str(caught.value) == text


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=6), st.text())
def test_any_integers_and_text_make_the_journey(numbers: list[int], text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    assert received(plain, *numbers) == (numbers, {})
    assert received(anything, text, key=text) == ([text], {"key": text})


def test_call_knows_context_and_coroutine() -> None:
    assert Call("t", with_context).takes_context
    assert not Call("t", context_not_first).takes_context
    assert Call("t", coroutine).is_async
    assert not Call("t", plain).is_async


def test_the_annotation_says_under_which_type_a_result_travels() -> None:
    def scaled() -> float: ...
    def level() -> Annotated[int, "int32"]: ...
    def several() -> tuple[list[int], Annotated[bytes, "[]byte"]]: ...
    def numbers() -> tuple[float, ...]: ...

    def types(function: Any, value: Any) -> list[str]:
        return [arg.type for arg in Call("task", function).results(value)]

    assert types(scaled, 2) == ["float64"]
    assert types(level, 2) == ["int32"]
    assert types(several, ([], b"")) == ["[]int64", "[]uint8"]
    assert types(numbers, (1, 2.5)) == ["float64", "float64"]
    assert types(several, (1,)) == ["int64"]  # another number of results than it says
    with pytest.raises(ArgumentError, match="task result: cannot send 1099511627776 as int32"):
        Call("task", level).results(2**40)


def test_results_go_back_by_the_annotation() -> None:
    call = Call("task", typed)
    (arg,) = call.results(Parcel("Ulm", 2.0))
    assert call.result(
        arg.value if arg.type == "json" else {"city": "Ulm", "weight": 2.0}
    ) == Parcel("Ulm", 2.0)
    assert Call("task", plain).results(None) == ()
    assert [one.value for one in Call("task", plain).results((1, "a"))] == [1, "a"]
    with pytest.raises(ArgumentError, match="task result: cannot send"):
        call.results(object())


# The registry


@pytest.fixture
def server() -> Server:
    return Server("memory://", clock=ManualClock())


def test_task_has_its_functions_name_by_default(server: Server) -> None:
    assert server.task(plain).name == "plain"
    assert server.task("billing.charge")(keywords).name == "billing.charge"
    assert server.register_task("other", anything).name == "other"
    server.register_tasks({"shout": str.upper})
    assert server.get_registered_task_names() == ["billing.charge", "other", "plain", "shout"]
    assert server.is_task_registered("shout")
    assert isinstance(server.task(coroutine), AsyncTask)


@pytest.mark.parametrize("nameless", [lambda: None, functools.partial(plain, 1)])
def test_nameless_callable_needs_a_task_name(server: Server, nameless: Any) -> None:
    with pytest.raises(TypeError, match=r"no name of its own: server\.register_task"):
        server.task(nameless)
    server.register_task("named", nameless)


def test_only_functions_can_be_tasks(server: Server) -> None:
    with pytest.raises(TypeError, match="Task must be a func type"):
        server.register_task("five", 5)  # type: ignore[arg-type]


def test_two_functions_cannot_have_one_name(server: Server) -> None:
    def make(value: int) -> Any:
        def same() -> int:
            return value

        return same

    def same() -> None: ...

    server.task(make(1))
    server.task(make(1))  # the same lines again: a module that was imported twice
    with pytest.raises(
        TaskAlreadyRegistered,
        match=r"task 'same' is already registered \(.*test_calls.py:\d+; give",
    ):
        server.task(same)


def test_closures_of_one_factory_cannot_have_one_name(server: Server) -> None:
    def make(value: Any, suffix: str = "") -> Any:
        def same(text: str = suffix) -> Any:
            return value, text, same

        return same

    first = server.task(make(1))
    for other in (make(2), make("1"), make(1, "x"), make(plain), make([])):
        with pytest.raises(TaskAlreadyRegistered, match="name of its own"):
            server.task(other)
    assert server.app.registry.get("same") is first
    server.task(make(1))


def test_methods_of_two_objects_cannot_have_one_name(server: Server) -> None:
    class Shop:
        def sell(self) -> None: ...

    shop = Shop()
    server.register_task("sell", shop.sell)
    server.register_task("sell", shop.sell)
    with pytest.raises(TaskAlreadyRegistered):
        server.register_task("sell", Shop().sell)


def test_two_functions_under_one_decorator_cannot_have_one_name(server: Server) -> None:
    def logged(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any) -> Any:
            return function(*args)

        return call

    def other() -> None: ...

    server.task("shared")(logged(plain))
    server.task("shared")(logged(plain))
    with pytest.raises(TaskAlreadyRegistered):
        server.task("shared")(logged(other))


def test_a_module_that_is_loaded_twice_registers_its_tasks_twice(server: Server) -> None:
    source = """
def logged(function):
    def call():
        return function(), call
    call.__name__ = function.__name__
    return call
def make(value):
    def inner(): return value
    return inner
def plain(): ...
def other(): return plain
"""
    shared: dict[str, Any] = {}
    exec(compile(source, "decorators.py", "exec"), shared)
    for _ in range(2):  # as __main__, and under its name
        module: dict[str, Any] = {}
        exec(compile(source, "tasks.py", "exec"), module)
        for name in ("plain", "other"):
            server.task(name)(module[name])
            server.task(f"logged {name}")(module["logged"](module[name]))
            server.task(f"logged elsewhere {name}")(shared["logged"](module[name]))
        server.task("made")(module["make"](object()))


def test_task_registered_twice_by_one_function_is_the_same(server: Server) -> None:
    def register() -> None:
        @server.task
        def child() -> None: ...

        @server.task
        def parent() -> None:
            child.send()
            parent.send()

    register()
    register()


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("max_retries", "did you mean 'retries'"),
        ("retrys", "did you mean 'retries'"),
        ("autoretry_for", "did you mean 'retry_on'"),
        ("soft_time_limit", "did you mean 'time_limit'"),
        ("result_ttl", "did you mean 'result_expires'"),
        ("queue_name", "did you mean 'queue'"),
        ("uniqe", "did you mean 'unique'"),
        ("acks_late", "did you mean 'ack'"),
        ("bind", "here it is a first parameter of type Context"),
        ("countdown", r"'delay' belongs to task\.options"),
        ("expires", r"'expires' belongs to task\.options"),
    ],
)
def test_unknown_option_of_a_task_is_refused_with_the_nearest(
    server: Server, option: str, hint: str
) -> None:
    with pytest.raises(TypeError, match=rf"plain: no option '{option}' \(known: ack, .*{hint}"):
        server.task(**{option: 3})(plain)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("countdown", "did you mean 'delay'"),
        ("task_id", "did you mean 'uuid'"),
        ("max_retries", "did you mean 'retries'"),
        ("link", "here it is signature.then"),
        ("retry_on", r"'retry_on' belongs to @server\.task"),
        ("dealy", "mean 'delay'"),
    ],
)
def test_unknown_option_of_a_call_is_refused_with_the_nearest(
    server: Server, option: str, hint: str
) -> None:
    with pytest.raises(TypeError, match=rf"plain: no option '{option}' \(known: block, .*{hint}"):
        server.task(plain).options(**{option: 3})  # type: ignore[typeddict-item]


def test_an_unknown_name_is_told_with_the_nearest(server: Server) -> None:
    server.task("billing.charge")(plain)
    text = r"task 'billing\.chrage' is not registered .*did you mean 'billing\.charge'"
    with pytest.raises(TaskNotRegistered, match=text):
        server.app.registry.get("billing.chrage")


def test_a_task_can_still_be_called(server: Server) -> None:
    assert server.task(plain)(1, 2, 3) == 6
    called: list[Any] = []
    task: Task[[int], None] = server.task("ctx")(lambda ctx, a: called.append((ctx, a)))
    assert task.function is not None

    @server.task
    def looks(ctx: Context, a: int) -> tuple[str, int]:
        ctx.progress(1, 2)
        return ctx.name, a

    assert looks(5) == ("looks", 5)


# Options


def test_options_say_how_a_call_is_sent(server: Server) -> None:
    task = server.task("t", queue="mail", retries=2, priority=3)(plain)
    now = server.now()

    assert (
        task.signature(1).routing_key,
        task.signature(1).retry_count,
        task.signature(1).priority,
    ) == ("mail", 2, 3)
    options = task.options(
        queue="slow", priority=9, retries=7, headers={"tenant": "acme"}, uuid="task_mine", delay=5
    )
    found = options.signature(1)
    assert (found.routing_key, found.priority, found.retry_count, found.uuid) == (
        "slow",
        9,
        7,
        "task_mine",
    )
    assert (found.headers, found.eta) == ({"tenant": "acme", HEADER_DELAY: "5.0"}, None)
    assert task.options(delay=dt.timedelta(hours=2)).signature(1).headers == {
        HEADER_DELAY: "7200.0"
    }
    assert task.options(eta=now).partial().eta == now


def test_delay_and_expiry_count_from_the_sending(server: Server) -> None:
    task, later = server.task(plain), server.now() + dt.timedelta(days=3)
    options = [
        task.options(delay=60, expires=120),
        task.options(delay=dt.timedelta(minutes=1), expires=dt.timedelta(minutes=2)),
    ]
    for found in (counted(one.signature(1), later) for one in options):
        assert found.eta == later + dt.timedelta(minutes=1)
        assert found.headers == {
            HEADER_EXPIRES: repr((later + dt.timedelta(minutes=2)).timestamp())
        }
        assert counted(found, later + dt.timedelta(days=1)) is found


def test_moments_do_not_depend_on_the_time_of_sending(server: Server) -> None:
    task, moment = server.task(plain), server.now()
    fixed = task.options(eta=moment, expires=moment).signature(1)
    assert fixed.headers == {HEADER_EXPIRES: repr(moment.timestamp())}
    late = moment + dt.timedelta(days=3)
    assert counted(fixed, late) is fixed
    assert counted(task.options(delay=5).signature(1).replace(eta=moment), late).eta == moment
    assert counted(fixed.with_headers(**{HEADER_EXPIRES_IN: "5.0"}), late) == fixed


@pytest.mark.parametrize("text", ["", "soon", "nan", "inf", "1e300"])
def test_a_length_that_is_none_is_dropped(text: str) -> None:
    odd: Signature[Any] = Signature(
        name="t", headers={HEADER_DELAY: text, HEADER_EXPIRES_IN: text, "tenant": "acme"}
    )
    assert counted(odd, dt.datetime(2026, 1, 2, tzinfo=dt.timezone.utc)) == Signature(
        name="t", headers={"tenant": "acme"}
    )


@pytest.mark.parametrize("length", [float("nan"), float("inf"), 1e300])
def test_a_length_that_no_clock_can_count_is_refused(server: Server, length: float) -> None:
    task = server.task(plain)
    for option in ("delay", "expires"):
        with pytest.raises(ValueError, match=f"plain: {option}="):
            task.options(**{option: length}).signature(1)  # type: ignore[typeddict-item]


def test_wrong_options_are_told(server: Server) -> None:
    task = server.task(plain)
    with pytest.raises(TypeError, match=r"plain: no option 'dealy' .*did you mean 'delay'"):
        task.options(dealy=5)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="expected a datetime with a time zone"):
        task.options(eta=dt.datetime(2027, 1, 1)).send(1)


def test_an_eta_without_a_zone_is_refused_in_a_signature_as_well(server: Server) -> None:
    task = server.task(plain)
    naive = task.signature(1).replace(eta=dt.datetime(2027, 1, 1))
    with pytest.raises((ValueError, ArgumentError)):
        server.send_task(naive)


def test_a_task_is_sent_while_another_thread_is_loading_asyncio(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server("memory://")
    task = server.register_task("plain", plain)
    monkeypatch.setitem(sys.modules, "asyncio", types.ModuleType("asyncio"))

    assert task.send(1).uuid


def test_threads_that_use_a_task_first_at_the_same_time_agree_on_its_parameters() -> None:
    both = threading.Barrier(2)

    def met() -> type[int]:
        both.wait(HANG)  # each has found that nobody knows the annotations yet
        return int

    names: dict[str, Any] = {"met": met}
    exec("def place(number: 'met()', *words: str) -> None: ...", names)
    call = Call("place", names["place"])
    sent = [
        Arg(type="int64", value=1),
        Arg(type="string", value="x"),
        Arg(type="string", value="y"),
    ]

    assert together(2, lambda _: call.values(sent)) == [([1, "x", "y"], {})] * 2
    assert call.values(sent) == ([1, "x", "y"], {})
