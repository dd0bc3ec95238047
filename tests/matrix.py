"""Which contract has been tried over which stores, as a page: docs/reference/matrix.md.

    make matrix      that is: pytest --write-matrix, with MACHINERY_TEST_PAIRS=1

A cell shows the last run of its suite over these stores: what a run leaves out stays as it was.

A test belongs to the suites that its class derives from; its stores are read from its fixtures. No
store is named here: a new one gets its rows when its URL can be opened and its tests run.
"""

from __future__ import annotations

import functools
import pathlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from machinery_py.errors import ConfigError, Unsupported
from machinery_py.stores import open
from machinery_py.stores.open import Family, FamilyOptions
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.backends import BackendConformance
from machinery_py.testing.conformance.brokers import BrokerConformance
from machinery_py.testing.conformance.claims import ClaimConformance
from machinery_py.testing.conformance.locks import LockConformance
from machinery_py.testing.conformance.schedules import ScheduleConformance
from machinery_py.testing.conformance.settlement import SettlementConformance
from machinery_py.testing.conformance.workers import WorkerConformance
from machinery_py.testing.conformance.workflows import LinkedConformance
from tests.support import private_mongo

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "reference" / "matrix.md"

#: What one store alone promises, and what a pair of broker and backend does.
ALONE: Mapping[str, type] = {
    "broker": BrokerConformance,
    "result backend": BackendConformance,
    "lock": LockConformance,
}
PAIRED: Mapping[str, type] = {
    "settlement": SettlementConformance,
    "schedules": ScheduleConformance,
    "workflows": LinkedConformance,
    "workers and queues": WorkerConformance,
    "unique keys": ClaimConformance,
}
SUITES = (*ALONE.items(), *PAIRED.items())

#: (suite, broker or store, backend or "") → how many tests passed, failed, and were left out.
Counts = dict[tuple[str, str, str], list[int]]
NEVER = "–"
REFUSED = "refused"  # tests/stores/test_refusals.py
_OUTCOMES = ("passed", "failed", "skipped")
_HEAD = """# Tests of each store and pair of stores

Written by test runs (`make matrix`). A cell has the number of passed tests of the suite; \
*failed* and *left out* are named where
there are any; "–": the suite was not run over these stores; \
*refused*: this result backend refuses it, in words. \
The suites are those of `machinery_py.testing.conformance`, the
same for every store. If a store cannot do something, \
the suite checks that it refuses it. `null` keeps nothing, so
it has no tests here. \
Where no `mongod` is installed, MongoDB's tests use a stand-in (here: {mongodb}).
"""


def stores() -> tuple[list[str], list[str]]:
    """The brokers and the result backends that can be opened, by the names in their features."""
    brokers: dict[str, None] = {}
    backends: dict[str, None] = {}
    for scheme in open.FAMILIES:
        family = _family(scheme)
        try:
            brokers[family.broker().features.name] = None
        except (Unsupported, ConfigError):
            pass
        try:
            features = family.backend().features
            if features.keeps:
                backends[features.name] = None
        except (Unsupported, ConfigError):
            pass
        family.close()
    return sorted(brokers), sorted(backends)


def without_claims() -> set[str]:
    """The result backends that refuse unique tasks; the suite of their keys is not for them."""
    found = set[str]()
    for scheme in open.FAMILIES:
        family = _family(scheme)
        try:
            features = family.backend().features
            if not features.claims:
                found.add(features.name)
        except (Unsupported, ConfigError):
            pass
        family.close()
    return found


@functools.cache
def _locks() -> dict[tuple[type, type], str]:
    """The name of the store that each kind of lock is of."""
    found: dict[tuple[type, type], str] = {}
    for scheme in open.FAMILIES:
        family = _family(scheme)
        try:
            found.setdefault(_kind_of(family.lock()), family.backend().features.name)
        except (Unsupported, ConfigError):
            pass
        family.close()
    return found


def _kind_of(lock: object) -> tuple[type, type]:
    return type(lock), type(getattr(lock, "_rows", None))  # one class for all stores of rows


def _family(scheme: str) -> Family:
    urls = {
        "eager": "eager",
        "null": "null",
        "memory": "memory://",
        "sqlite": "sqlite:///matrix.db",
        "redis+socket": "redis+socket:///s",
    }
    return open.open_family(urls.get(scheme, f"{scheme}://h"), FamilyOptions(clock=ManualClock()))


def _names(found: Mapping[str, Any]) -> tuple[str, str] | None:
    """Broker and backend of the fixtures that a test got."""
    app = found.get("app") or found.get("idle")
    server = found.get("server") or getattr(app, "server", None)
    if server is not None:
        scheme = str(server.config.broker).partition(":")[0]
        return (
            "eager" if scheme == "eager" else server.broker.features.name
        ), server.backend.features.name
    store = found.get("store")
    return (store.broker.features.name, store.backend.features.name) if store is not None else None


def _alone(suite: str, found: Mapping[str, Any]) -> str:
    if suite == "lock":
        return _locks().get(_kind_of(found["lock"]), "") if "lock" in found else ""
    one = found.get("broker" if suite == "broker" else "backend")
    return str(one.features.name) if one is not None else ""


def is_counted(item: pytest.Item, suite: str, base: type) -> bool:
    """Whether the test is one of this suite."""
    cls, name = getattr(item, "cls", None), getattr(item, "originalname", item.name)
    if cls is None or not issubclass(cls, base) or not hasattr(base, name):
        return False
    return suite != "workers and queues" or not hasattr(
        LinkedConformance, name
    )  # counted with the workflows


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


class Matrix:
    """Deselects tests that it does not count, collects during the run, and then writes the page.

    Processes of pytest-xdist hand what they collected to the one that started them.
    """

    def __init__(self) -> None:
        self._wanted: Counter[tuple[str, str]] = Counter()  # suite, class → its tests
        self._of_class: dict[tuple[str, str], tuple[str, str]] = {}
        self._seen: Counter[tuple[str, str, str]] = Counter()  # suite, class, outcome

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        counted = [item for item in items if any(is_counted(item, *suite) for suite in SUITES)]
        config.hook.pytest_deselected(items=list(set(items) - set(counted)))
        items[:] = counted
        self._wanted.update(
            (suite, _name(item.cls))  # type: ignore[attr-defined] - it is a test of a class
            for item in counted
            for suite, base in SUITES
            if is_counted(item, suite, base)
        )

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        outcome: Any = yield
        report = outcome.get_result()
        cls = getattr(item, "cls", None)
        if cls is None or not (
            report.when == "call" or report.failed or (report.when == "setup" and report.skipped)
        ):
            return
        found = getattr(item, "funcargs", {})
        for suite, base in SUITES:
            if not is_counted(item, suite, base):
                continue
            names = (
                _names(found)
                if suite in PAIRED
                else ((one, "") if (one := _alone(suite, found)) else None)
            )
            if names is not None:
                self._of_class.setdefault((suite, _name(cls)), names)
            self._seen[suite, _name(cls), report.outcome] += 1

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        of_class, seen, wanted = getattr(node, "workeroutput", {}).get("matrix", ([], [], []))
        self._of_class.update((tuple(key), tuple(names)) for key, names in of_class)
        self._seen.update({tuple(key): count for key, count in seen})
        self._wanted = Counter({tuple(key): count for key, count in wanted}) | self._wanted

    def counts(self) -> Counts:
        left = self._wanted.copy()
        for (suite, cls, _), count in self._seen.items():
            left[suite, cls] -= count
        unfinished = {  # interrupted: a part of the tests says nothing
            (suite, *self._of_class[suite, cls])
            for (suite, cls), number in left.items()
            if number > 0 and (suite, cls) in self._of_class
        }
        counts: Counts = {}
        for (suite, cls, outcome), count in self._seen.items():
            names = self._of_class.get((suite, cls))
            if names is not None and (key := (suite, *names)) not in unfinished:
                counts.setdefault(key, [0, 0, 0])[_OUTCOMES.index(outcome)] += count
        return counts

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is None:
            PAGE.write_text(page(self.counts(), before=PAGE.read_text() if PAGE.exists() else ""))
        else:
            found = self._of_class, self._seen, self._wanted
            output["matrix"] = [list(one.items()) for one in found]


def cells(text: str) -> dict[tuple[str, str, str], str]:
    """What the page says: (suite, broker or store, backend or "") → cell."""
    found: dict[tuple[str, str, str], str] = {}
    for title, suites in (("Stores", ALONE), ("Pairs", PAIRED)):
        for line in text.partition(f"## {title}\n")[2].partition("\n## ")[0].splitlines():
            row = [cell.strip() for cell in line.strip("|").split("|")]
            names, said = row[: -len(suites)], row[-len(suites) :]
            if len(names) == (1 if suites is ALONE else 2):
                found |= {
                    (suite, names[0], names[1] if names[1:] else ""): cell
                    for suite, cell in zip(suites, said, strict=True)
                }
    return found


def page(counts: Counts, *, before: str = "") -> str:
    """The page with the cells of this run, and the others of the page before."""
    brokers, backends = stores()
    known = cells(before) | {key: _cell(*count) for key, count in counts.items()}
    known |= {
        ("unique keys", broker, backend): REFUSED
        for broker in brokers
        for backend in without_claims()
    }
    names = sorted({*brokers, *backends})
    alone = [[name, *(known.get((suite, name, ""), NEVER) for suite in ALONE)] for name in names]
    paired = [
        [broker, backend, *(known.get((suite, broker, backend), NEVER) for suite in PAIRED)]
        for broker in brokers
        for backend in backends
    ]
    return "\n".join(
        [
            _HEAD.format(mongodb=private_mongo.best_kind()),
            "## Stores",
            "",
            *_table(["store", *ALONE], alone),
            "",
            "## Pairs",
            "",
            *_table(["broker", "result backend", *PAIRED], paired),
            "",
        ]
    )


def _cell(passed: int, failed: int, skipped: int) -> str:
    said = [f"{passed} passed"] if passed else []
    said += [f"**{failed} failed**"] if failed else []
    said += [f"{skipped} left out"] if skipped else []
    return ", ".join(said) or NEVER


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(head) + " |",
        "|---" * len(head) + "|",
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
