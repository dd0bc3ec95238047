"""Documentation drawn from the code: tables, method signatures, the bytes of the examples.

python -m tests.docs.drawn      write what is drawn into the pages
"""

from __future__ import annotations

import ast
import datetime as dt
import inspect
import pathlib
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any

from machinery_py.connections.memcached import keys as memcached_keys
from machinery_py.connections.mongodb import collections as mongodb_collections
from machinery_py.connections.postgresql import schema as postgresql_schema
from machinery_py.connections.rabbitmq import queues as rabbitmq_queues
from machinery_py.connections.redis import keys as redis_keys
from machinery_py.connections.sqlite import schema as sqlite_schema
from machinery_py.connections.stored_items import StoredItem
from machinery_py.tasks.signature import Arg, Signature
from machinery_py.tasks.states import _NEXT_RUN, LEGAL, GroupMeta, State, TaskState
from machinery_py.wire.signatures import encode_signature
from machinery_py.wire.states import encode_group, encode_state
from machinery_py.worker.running.execution import STEPS, Transition
from tests.docs import celery_rows, dashboard_rows
from tests.system import endings

ROOT = pathlib.Path(__file__).parents[2]

# States


def transitions(table: Mapping[Any, frozenset[State]]) -> str:
    """Which state may follow which, as a table."""
    lines = ["| from \\ to | " + " | ".join(State) + " |", "|---" * (len(State) + 1) + "|"]
    for before, after in table.items():
        cells = ["yes" if state in after else "–" for state in State]
        lines.append(f"| {before or '(none)'} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def steps(table: Iterable[Transition]) -> str:
    """Which stage of an execution may follow which, as a table."""
    lines = ["| step | from | to | made by |", "|---|---|---|---|"]
    for step in table:
        before = ", ".join(one.name for one in step.before)
        after = "the same" if step.after is None else step.after.name
        lines.append(f"| `{step.verb}` | {before} | {after} | {step.by} |")
    return "\n".join(lines)


# The import rule


def import_rows() -> str:
    """Return the rows of tests/test_architecture.py, from the lowest."""
    tree = ast.parse((ROOT / "tests" / "test_architecture.py").read_text())
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and node.target.id == "ROWS"
        ):
            rows = [
                one.value
                for one in ast.walk(node)
                if isinstance(one, ast.Constant) and isinstance(one.value, str)
            ]
            return "\n".join(f"{number:2}  {row}" for number, row in enumerate(rows, 1))
    raise AssertionError("tests/test_architecture.py has no ROWS")


# What lies on a server


def stored(items: Iterable[StoredItem], *, shared: bool | None = None) -> str:
    """Return a table of the items; with `shared`, only Go Machinery's, or only the others."""
    wanted = [one for one in items if shared in (None, one.shared)]
    typed = len({one.kind for one in wanted}) > 1
    heads = ["name", *(["type"] if typed else []), "holds", "kept", "written by"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for one in wanted:
        cells = [f"`{one.name}`", *([one.kind] if typed else []), one.holds, one.lives, one.writer]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


_REDIS = redis_keys.ITEMS
_RABBITMQ = rabbitmq_queues.BROKER

# Messages

SENT_AT = dt.datetime(2026, 11, 20, 11, 44, 32, 400158, tzinfo=dt.timezone.utc)

ADD: Signature[Any] = Signature(
    name="add",
    uuid="task_7e1e262a-41e9-4fac-8337-292731c4e115",
    routing_key="machinery_tasks",
    args=[Arg(type="int64", value=1), Arg(type="int64", value=2)],
)
SECOND_TRY: Signature[Any] = ADD.replace(
    eta=SENT_AT,
    retry_count=2,
    retry_timeout=1,
    headers={"machinery_run": "1", "machinery_attempt": "2"},
)
MEMBER: Signature[Any] = Signature(
    name="a",
    uuid="task_2651d9bc-3cd8-44cd-b59f-ff315997a1e4",
    routing_key="machinery_tasks",
    group_uuid="group_ff2088e4-0ee1-4b8b-80a0-8df40174b02d",
    group_task_count=2,
    chord_callback=Signature(name="cb", uuid="chord_630d38fa-f7cb-4751-b02b-e92b5a0baf64"),
)
SUCCESS = TaskState(
    task_uuid=ADD.uuid,
    task_name="add",
    state=State.SUCCESS,
    results=(Arg(type="int64", value=3),),
    created_at=SENT_AT,
)
GROUP = GroupMeta(group_uuid=MEMBER.group_uuid, task_uuids=(MEMBER.uuid,), created_at=SENT_AT)


def _json(body: bytes) -> str:
    return f"```json\n{body.decode()}\n```"


DRAWN: Mapping[str, Callable[[], str]] = {
    "states.LEGAL": lambda: transitions(LEGAL),
    "execution.STEPS": lambda: steps(STEPS),
    "states next run": lambda: transitions(_NEXT_RUN),
    "endings": endings.table,
    "endings otherwise": endings.otherwise,
    "celery clock": lambda: celery_rows.table(celery_rows.CLOCK),
    "celery control": lambda: celery_rows.table(celery_rows.CONTROL),
    "celery worker": lambda: celery_rows.table(celery_rows.WORKER),
    "celery faults": lambda: celery_rows.table(celery_rows.FAULTS),
    "go rows": lambda: celery_rows.table(celery_rows.GO, "Go"),
    "routes of the dashboard": dashboard_rows.routes,
    "records of the dashboard": dashboard_rows.records,
    "operations": dashboard_rows.operations,
    "imports": lambda: f"```text\n{import_rows()}\n```",
    "message add": lambda: _json(encode_signature(ADD)),
    "message second try": lambda: _json(encode_signature(SECOND_TRY)),
    "message chord member": lambda: _json(encode_signature(MEMBER)),
    "state": lambda: _json(encode_state(SUCCESS)),
    "group": lambda: _json(encode_group(GROUP)),
    "redis keys of Go": lambda: stored(_REDIS, shared=True),
    "redis keys": lambda: stored(_REDIS, shared=False),
    "rabbitmq queues of Go": lambda: stored(_RABBITMQ, shared=True),
    "rabbitmq queues": lambda: stored(_RABBITMQ, shared=False),
    "rabbitmq result queues": lambda: stored(rabbitmq_queues.RESULT_BACKEND),
    "mongodb collections of Go": lambda: stored(mongodb_collections.ITEMS, shared=True),
    "mongodb collections": lambda: stored(mongodb_collections.ITEMS, shared=False),
    "memcached keys": lambda: stored(memcached_keys.ITEMS),
    "sqlite tables": lambda: stored(sqlite_schema.ITEMS),
    "postgresql tables": lambda: stored(postgresql_schema.ITEMS),
}


# Methods


def shape(owner: type, name: str) -> str:
    """`Owner.name(parameters)` without annotations; a property is its name alone."""
    found = inspect.getattr_static(owner, name)
    label = f"{owner.__name__}.{name}"
    if isinstance(found, property):
        return label
    bound = isinstance(found, staticmethod | classmethod)
    parameters = list(inspect.signature(getattr(owner, name)).parameters.values())
    return label + _written(parameters if bound else parameters[1:])


def shape_of_function(function: Callable[..., Any]) -> str:
    return function.__name__ + _written(list(inspect.signature(function).parameters.values()))


def _written(parameters: list[inspect.Parameter]) -> str:
    plain = [
        one.replace(
            annotation=one.empty,
            default=one.default.value if isinstance(one.default, Enum) else one.default,
        )
        for one in parameters
    ]
    return str(inspect.Signature(plain))


# Pages


def redrawn(text: str) -> str:
    """The page with everything drawn anew between `<!-- drawn: name -->` and `<!-- end -->`."""
    for name, draw in DRAWN.items():
        start = f"<!-- drawn: {name} -->\n"
        if start in text:
            before, _, rest = text.partition(start)
            _, _, after = rest.partition("<!-- end -->")
            text = f"{before}{start}{draw()}\n<!-- end -->{after}"
    return text


def main() -> None:
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = page.read_text()
        if (new := redrawn(text)) != text:
            page.write_text(new)
            print("drawn:", page.relative_to(ROOT))


if __name__ == "__main__":
    main()
