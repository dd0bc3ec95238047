"""The floors of docs/architecture.md: imports go down only; files and functions stay small."""

from __future__ import annotations

import ast
import fnmatch
import pathlib
import statistics
from collections.abc import Iterator

PACKAGE = pathlib.Path(__file__).parents[1] / "machinery_py"
MAX_FILE = 500  # lines
MAX_FUNCTION = 60  # lines, without the docstring

#: A module stands on the first row that names it, and may import earlier rows only.
FLOORS: tuple[frozenset[str], ...] = tuple(
    frozenset(row.split())
    for row in (
        "texts",
        "errors clock backoff version durability forks descriptors twins",
        "values_go names",
        "values_json",
        "values",
        "signature",
        "states",
        "workflow",
        "wire_time wire_levels",
        "wire_lenient",
        "wire_args",
        "wire_states",
        "wire_decode",
        "wire",
        "_drivers _drivers.redis_url _drivers.memcache_url _drivers.amqp_url _drivers.mongo_url _drivers.plain_words",
        "outcomes events urls config_files queues cron",
        "schedule failover",
        "periodic config_options",
        "config_sections",
        "config",
        "settings",
        "brokers.base backends.base locks.base",
        "brokers backends locks settlement",
        "backends.transactional settlement.base",
        "_drivers _drivers.memory _drivers.tokens _drivers.doorbell _drivers.sqlite_errors _drivers.sqlite_schema"
        " _drivers.sqlite_rows _drivers.sqlite_handles"
        " _drivers.redis_durability _drivers.redis_errors _drivers.redis_keys _drivers.redis_lua _drivers.session_info"
        " _drivers.run_table _drivers.amqp_frames _drivers.mongo_errors _drivers.mongo_durability",
        "_drivers.sqlite_open _drivers.session_files _drivers.redis_servers _drivers.redis_slots _drivers.redis_pool"
        " _drivers.amqp_connection _drivers.amqp_confirms",
        "_drivers.redis _drivers.redis_nodes _drivers.amqp_link",
        "_drivers.redis_tries _drivers.amqp_publisher _drivers.amqp_reader",
        "_drivers.amqp",
        "_drivers.*",
        "brokers.sqlite_consumer backends.sqlite_records backends.sqlite_listener brokers.amqp_messages brokers.amqp_topology"
        " brokers.mongo_messages backends.mongo_records backends.mongo_groups backends.mongo_listener",
        "brokers.redis_lua backends.redis_lua backends.redis_listener"
        " brokers.amqp_claims brokers.amqp_sending brokers.amqp_presence brokers.mongo_consumer",
        "brokers.redis_scripts brokers.redis_messages backends.redis_scripts backends.redis_records"
        " backends.redis_amend brokers.amqp_holding brokers.amqp_returns brokers.amqp_gets brokers.amqp_pauses"
        " backends.mongo_tasks",
        "brokers.redis_looking brokers.redis_consumer backends.redis_cluster_scripts brokers.amqp_looking brokers.amqp_taking"
        " backends.mongo_schedules backends.mongo_looking",
        "brokers.redis brokers.redis_cluster_consumer backends.redis locks.redis brokers.amqp_consumer"
        " backends.redis_cluster_records backends.redis_cluster_lists",
        "backends.redis_cluster_steps",
        "backends.memcache_records backends.memcache_listener",
        "backends.memcache_index",
        "backends.memcache_groups backends.memcache_jobs backends.amqp_records",
        "backends.memcache_amend backends.amqp_groups backends.amqp_revocations backends.amqp_amend",
        "backends.amqp_listener",
        "brokers.* backends.* locks.*",
        "settlement.one_store settlement.redis_scripts settlement.redis_amend",
        "settlement.two_stores_session",
        "settlement.two_stores",
        "settlement.*",
        "families families.base families.network",
        "families.memory families.redis_cluster",
        "families.*",
        "factory",
        "context",
        "hub named_lock",
        "results",
        "calls",
        "sameness",
        "task",
        "registry",
        "engine",
        "scheduler unique endings",
        "schedules",
        "declaring inspection worker worker.usercode worker.courtesy worker.fleet worker.stopping worker.ticking",
        "worker.gate",
        "worker.execution",
        "worker.runner",
        "worker.acceptance worker.executors worker.firing worker.outage worker.telling",
        "worker.settler",
        "worker.limits worker.receiver",
        "worker.upkeep",
        "worker.worker",
        "worker.inline",
        "server",
        "__init__",
        "cli cli.* testing testing.* __main__",
    )
)
DOORS = len(FLOORS) - 1  # the doors may import each other


def modules() -> Iterator[tuple[str, pathlib.Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        yield name, path


def floor_of(module: str) -> int:
    for number, row in enumerate(FLOORS):
        if module in row:
            return number
    for number, row in enumerate(FLOORS):
        if any("*" in pattern and fnmatch.fnmatch(module, pattern) for pattern in row):
            return number
    raise AssertionError(f"module {module} stands on no floor: add it to FLOORS")


def imports(path: pathlib.Path, known: frozenset[str]) -> Iterator[tuple[str, int]]:
    """Every import of ours, also inside functions and under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0] == "machinery_py"
        ):
            base = node.module.removeprefix("machinery_py").lstrip(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".lstrip(".")
                yield (inner if inner in known else base or "__init__"), node.lineno
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "machinery_py":
                    yield (
                        alias.name.removeprefix("machinery_py").lstrip(".") or "__init__",
                        node.lineno,
                    )


def test_imports_go_down_only() -> None:
    known = frozenset(name for name, _ in modules())
    wrong: list[str] = []
    for name, path in modules():
        own = floor_of(name)
        for target, line in imports(path, known):
            other = floor_of(target)
            if other > own or (other == own and own != DOORS and target != name):
                wrong.append(
                    f"{path.relative_to(PACKAGE.parent)}:{line}: {name} (row {own}) imports {target} (row {other})"
                )

    assert not wrong, "\n" + "\n".join(wrong)


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    long = {
        name: lines
        for name, path in modules()
        if (lines := path.read_text().count("\n")) > MAX_FILE
    }

    assert not long


def functions() -> Iterator[tuple[str, int]]:
    for name, path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                if ast.get_docstring(node) is not None:
                    size -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
                yield f"{name}:{node.lineno} {node.name}", size


def test_no_function_is_longer_than_a_screen() -> None:
    long = {name: size for name, size in functions() if size > MAX_FUNCTION}

    assert not long


def test_most_functions_are_a_few_lines() -> None:
    assert statistics.median(size for _, size in functions()) <= 8


def test_every_module_says_what_it_holds() -> None:
    silent = [
        name for name, path in modules() if not ast.get_docstring(ast.parse(path.read_text()))
    ]

    assert not silent


def test_no_pickle_and_no_import_by_name_from_a_message() -> None:
    """Messages are JSON; names in them are looked up in the registry. The places that import by name are listed."""
    may_import = {
        "factory",
        "cli.main",
        "cli.doctor",
        "cli.apps",
        "cli.supervisor",
        "cli.reload",
        "testing.plugin",
    }
    wrong: list[str] = []
    for name, path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name for alias in node.names} | {getattr(node, "module", "") or ""}
                if names & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}:
                    wrong.append(f"{name}:{node.lineno} imports {names}")
                if "importlib" in names and name not in may_import:
                    wrong.append(f"{name}:{node.lineno} imports importlib")
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in {"eval", "exec", "__import__"}
            ):
                wrong.append(f"{name}:{node.lineno} calls {node.func.id}")

    assert not wrong
