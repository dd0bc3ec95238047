"""Store plug-ins: packages on the path that bring a scheme."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from machinery_py import Config, ConfigError, Server
from machinery_py.config import plugins
from machinery_py.config.options import Section, option
from machinery_py.stores.open import Family


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOptions(Section):
    PREFIX: ClassVar[str] = "stores.silent."

    token: str = option("", "what the server asks for")
    size: int = option(1, "how much")


class SilentFamily(Family):
    """A broker only, without options."""

    roles = ("broker",)


class Install:
    """Lays packages with one store plug-in each on the path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, scheme: str, target: str, *, name: str = "some-store") -> None:
        info = self.folder / f"{name.replace('-', '_')}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[machinery_py.stores]\n{scheme} = {target}\n")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(plugins, "_loaded", {})
    return Install(tmp_path)


def test_plugin_that_cannot_be_imported_is_named(install: Install) -> None:
    install("broken", "no_such_module:Store")

    with pytest.raises(ConfigError) as caught:
        Server("broken://here")

    assert str(caught.value) == (
        "store plug-in 'broken' (no_such_module:Store of some-store 1.2) cannot be imported: "
        "ModuleNotFoundError: No module named 'no_such_module' "
        "(repair or uninstall some-store 1.2)"
    )


def test_plugin_that_is_no_store_is_refused(install: Install) -> None:
    install("odd", "pathlib:Path")

    with pytest.raises(ConfigError, match=r"'odd' \(pathlib:Path of some-store 1\.2\) is no store"):
        Config(broker="odd://here")


def test_two_packages_with_one_scheme_are_both_named(install: Install) -> None:
    install("twice", "one:Store")
    install("twice", "two:Store", name="other-store")

    with pytest.raises(ConfigError) as caught:
        Config(broker="twice://here")

    assert "one:Store of some-store 1.2" in str(caught.value)
    assert "two:Store of other-store 1.2" in str(caught.value)


def test_plugin_is_refused_in_a_role_that_it_lacks(install: Install) -> None:
    install("silent", f"{__name__}:SilentFamily")

    with pytest.raises(ConfigError, match="'silent' works as broker only"):
        Config(broker="memory://", result_backend="silent://here")
    with pytest.raises(ConfigError, match="the store 'silent' has no options \\(found size\\)"):
        Config(stores={"silent": {"size": 3}})


def test_unknown_scheme_tells_of_installed_plugins(install: Install) -> None:
    install("silent", f"{__name__}:SilentFamily")

    with pytest.raises(ConfigError, match="; from plug-ins: silent; did you mean 'silent'?"):
        Config(broker="silnt://here")
    with pytest.raises(ConfigError, match="; no installed package brings it"):
        Config(broker="zzzzzzzz://here")


def test_own_options_are_shown_without_their_values(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("silent", f"{__name__}:SilentFamily")
    monkeypatch.setattr(SilentFamily, "section", TokenOptions)

    config = Config(stores={"silent": {"token": "secret", "size": 3}})
    digits = Config(stores={"silent.token": 123456})  # as MACHINERY_STORES is read

    assert config.redacted()["stores"] == {"silent": {"token": "***", "size": "***"}}
    assert "secret" not in repr(config)
    assert "123456" not in repr(digits)


def test_store_that_is_given_as_the_config_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"found ABCMeta .* named: broker="):
        Server(SilentFamily)  # type: ignore[arg-type]  # what is tested


def test_object_in_a_wrong_role_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"broker: found ABCMeta \(expected a URL or a Broker\)"):
        Server(broker=SilentFamily)  # type: ignore[arg-type]  # what is tested


@pytest.mark.parametrize("url", ["redis://localhost", "sqlite:///a.db", "memory://"])
def test_stores_of_this_package_read_no_entry_points(url: str) -> None:
    program = (
        "from machinery_py import Server\n"
        "from machinery_py.config import plugins\n"
        "plugins._entry_points = None  # so that a call fails\n"
        f"Server({url!r}).app.stores\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )

    assert done.stderr == ""
