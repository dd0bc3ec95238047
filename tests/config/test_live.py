"""Settings that are read again while a worker runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from machinery_py import Config, ConfigError
from machinery_py.config.config import resolve
from machinery_py.config.live import LIVE, read_again

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "deployment.md"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text('broker = "memory://"\nconcurrency = 2\nlease = 20\n')
    return path


def test_changed_file_is_read_again_for_these_settings_alone(path: Path) -> None:
    config = resolve(environ={"MACHINERY_CONFIG": str(path)})
    path.write_text(
        'broker = "eager://"\nrequire_server = true\nlease = 99\n'
        "concurrency = 3\nlog_tasks = false\n"
    )

    again = read_again(config, {"MACHINERY_CONFIG": str(path)})

    assert (again.concurrency, again.log_tasks) == (3, False)
    assert (again.broker, again.lease) == ("memory://", 20)
    assert again.sources["log_tasks"] == str(path)
    path.write_text("")
    assert read_again(again, {"MACHINERY_CONFIG": str(path)}).log_tasks is True


def test_file_that_the_app_names_is_read_again(path: Path) -> None:
    config = resolve(config=Config.from_toml(path), environ={})
    path.write_text("concurrency = 3\nevents = true\n")

    again = read_again(config, {"MACHINERY_EVENTS": "false", "MACHINERY_LOG_TASKS": "false"})

    assert (again.concurrency, again.events, again.log_tasks) == (3, True, False)


def test_values_that_were_passed_stay_and_the_environment_wins(path: Path) -> None:
    environ = {"MACHINERY_CONFIG": str(path), "MACHINERY_CONCURRENCY": "5"}
    config = resolve(config=Config(log_level="debug"), environ=environ)
    path.write_text('concurrency = 3\nlog_level = "error"\n')

    again = read_again(config, environ)

    assert (again.concurrency, again.log_level) == (5, "debug")
    assert again.sources == config.sources


def test_file_that_the_app_names_wins_again_whatever_is_left_of_it(path: Path) -> None:
    both = {"MACHINERY_CONFIG": str(path), "MACHINERY_CONCURRENCY": "9"}
    config = resolve(config=Config.from_toml(path), environ=both)
    assert (config.concurrency, read_again(config, both).concurrency) == (2, 2)

    path.write_text("")
    config = resolve(config=Config.from_toml(path).replace(broker="memory://"), environ={})
    path.write_text("concurrency = 5\n")
    assert read_again(config, {}).concurrency == 5


@pytest.mark.parametrize("text", ["concurrency = -1", 'log_level = "loud"', "no toml"])
def test_file_that_cannot_be_used_is_refused(path: Path, text: str) -> None:
    config = resolve(environ={"MACHINERY_CONFIG": str(path)})
    path.write_text(text)

    with pytest.raises(ConfigError, match=r"config\.toml"):
        read_again(config, {"MACHINERY_CONFIG": str(path)})


def test_page_names_exactly_these_settings() -> None:
    rows = PAGE.read_text().partition("## Settings while it runs")[2].split("\n## ")[0]
    named = [line.split("`")[1] for line in rows.splitlines() if line.startswith("| `")]

    assert tuple(sorted(named)) == LIVE
