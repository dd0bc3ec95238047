"""Scripts come from `.lua` files: pieces are included once, and constants are filled in.

An error names what is missing, and its place.
"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from machinery_py.connections.redis.scripts import Folder

FILES = {
    "lua/prelude.lua": "-- Of all.\n\nlocal call = redis.call\n",
    "lua/queues.lua": "-- Of queues.\n--! include lua/prelude.lua\n\nlocal life = $LIFE\n",
    "lua/states.lua": "-- Of states.\n--! include lua/prelude.lua\n\nlocal states = {}\n",
    "lua/settle.lua": "-- In: nothing. Out: nothing.\n"
    "--! include lua/queues.lua\n--! include lua/states.lua\n\n"
    "if call then\n  -- a reason\n\n  return life + $MORE -- beside code\nend\n",
    "lua/lost.lua": "-- In: nothing.\n--! include lua/nowhere.lua\n\nreturn 1\n",
    "lua/rare.lua": "-- In: nothing. Out: nothing.\n--! include lua/prelude.lua\n"
    "if call then return 1 end\n--! include lua/states.lua\nreturn states\n",
    "lua/wrong.lua": "--! inclde lua/prelude.lua\nreturn 1\n",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A package of these files, in a zip, as a wheel may be."""
    name = "lua_of_" + re.sub(r"\W", "_", request.node.name)
    with zipfile.ZipFile(tmp_path / "package.zip", "w") as archive:
        archive.writestr(f"{name}/__init__.py", "")
        for path, text in FILES.items():
            archive.writestr(f"{name}/{path}", text)
    monkeypatch.syspath_prepend(tmp_path / "package.zip")
    return name


def test_script_has_each_piece_once_in_order_without_comments(package: str) -> None:
    script = Folder("lua", {"LIFE": 600, "OTHER": 1}, package=package).script("settle", MORE=7)

    assert script.path == "lua/settle.lua"
    assert script.text.splitlines() == [
        "local call = redis.call",
        "local life = 600",
        "local states = {}",
        "if call then",
        "  return life + 7 -- beside code",
        "end",
    ]


def test_constant_without_value_is_refused_with_its_place(package: str) -> None:
    with pytest.raises(ValueError, match=r"lua/queues\.lua:4: \$LIFE has no value"):
        Folder("lua", package=package).script("settle", MORE=7)


def test_constant_that_nothing_names_is_refused(package: str) -> None:
    with pytest.raises(ValueError, match=r"lua/settle\.lua: nothing names the constants LESS"):
        Folder("lua", {"LIFE": 600}, package=package).script("settle", MORE=7, LESS=1)


def test_missing_file_is_refused_with_the_place_of_its_include(package: str) -> None:
    with pytest.raises(ValueError, match=r"lua/lost\.lua:2: lua/nowhere\.lua is not there"):
        Folder("lua", package=package).script("lost")
    with pytest.raises(ValueError, match=r"lua/none\.lua is not there"):
        Folder("lua", package=package).script("none")


def test_piece_stands_where_the_script_includes_it(package: str) -> None:
    assert Folder("lua", package=package).text("rare").splitlines() == [
        "local call = redis.call",
        "if call then return 1 end",
        "local states = {}",
        "return states",
    ]


def test_directive_that_is_none_is_refused_with_its_place(package: str) -> None:
    with pytest.raises(ValueError, match=r"lua/wrong\.lua:1: .* \(expected '--! include"):
        Folder("lua", package=package).script("wrong")


def test_importing_the_package_alone_reads_no_lua_file() -> None:
    program = """
import sys
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
import machinery_py
print(sum(name.endswith(".lua") for name in opened))
import machinery_py.stores.redis
print(sum(name.endswith(".lua") for name in opened) > 10)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )

    assert done.stdout.split() == ["0", "True"], done.stderr
