"""The matrix of stores and suites is whole, and says of no suite that it failed."""

from __future__ import annotations

import itertools

from tests.docs.test_docs import ROOT
from tests.matrix import ALONE, PAGE, PAIRED, REFUSED, page, stores


def rows(title: str) -> list[list[str]]:
    part = PAGE.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_page_has_every_store_pair_and_suite() -> None:
    brokers, backends = stores()
    head, *lines = rows("Pairs")
    assert head == ["broker", "result backend", *PAIRED]
    assert [(line[0], line[1]) for line in lines] == list(itertools.product(brokers, backends))
    head, *lines = rows("Stores")
    assert head == ["store", *ALONE]
    assert [line[0] for line in lines] == sorted({*brokers, *backends})


def test_every_pair_has_run_every_suite_and_nothing_failed() -> None:
    assert "failed**" not in PAGE.read_text()
    for broker, backend, *cells in rows("Pairs")[1:]:
        assert all("passed" in cell or cell == REFUSED for cell in cells), (broker, backend)


def test_a_failure_is_shown() -> None:
    drawn = page({("workflows", "redis", "redis"): [3, 1, 2]})
    assert "| redis | redis | – | – | 3 passed, **1 failed**, 2 left out | – | – |" in drawn


def test_the_page_is_found() -> None:
    assert "reference/matrix.md" in (ROOT / "docs" / "index.md").read_text()
