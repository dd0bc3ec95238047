"""`machinery`: words, help, the app that is named, errors and exit codes."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from machinery_py import __version__
from machinery_py.cli.commands import COMMANDS, GROUPS, SECTIONS, split_words
from machinery_py.cli.main import command_parser, main
from machinery_py.cli.options import seconds
from tests.cli.app import HANG, App, app_in_a_folder

app = app_in_a_folder

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"


# Words


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_every_command_ends_in_examples(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*name.split(), "--help"]) == 0

    text = capsys.readouterr().out
    examples = text[text.index("\nexamples:\n") :].strip().splitlines()[1:]
    assert examples
    assert all(f"machinery {name}" in line for line in examples)


@pytest.mark.parametrize("words", [["--help"], ["dead", "--help"]])
def test_the_help_above_the_commands_ends_in_examples(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0

    assert "\nexamples:\n  machinery" in capsys.readouterr().out


def test_each_command_is_in_one_section_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    names = [name for members in SECTIONS.values() for name in members]
    assert sorted(names) == sorted({name.partition(" ")[0] for name in COMMANDS})

    assert main(["--help"]) == 0
    shown = capsys.readouterr().out.partition("\ncommands:\n")[2].partition("\nexamples:")[0]
    words = re.findall(r"^ {2,4}([a-z]+:?)", shown, re.MULTILINE)
    assert words == [one for name, of in SECTIONS.items() for one in (f"{name}:", *of)]


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_lists_by_itself_and_its_help_names_what_is_below(
    group: str, app: App, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = app.run(group, "tasks", "--json")
    assert (listed.returncode, json.loads(listed.stdout)) == (0, [])
    assert app.run(group, "list", "tasks", "--json").stdout == listed.stdout

    assert main([group, "--help"]) == 0
    text = capsys.readouterr().out
    below = [name for name in COMMANDS if name.startswith(f"{group} ")]
    assert re.findall(rf"^  machinery ({group} \w+)  ", text, re.MULTILINE)[: len(below)] == below


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0

    first, python, *libraries = capsys.readouterr().out.splitlines()
    assert first == f"machinery {__version__}"
    assert python.startswith(f"{platform.python_implementation()} {platform.python_version()} on ")
    names = ["msgspec", "redis", "pymongo", "pika", "croniter", "psycopg"]
    assert libraries == [f"{name} {metadata.version(name)}" for name in names]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("wroker tasks", "no command is called 'wroker'; did you mean 'worker'?"),
        ("dead lsit tasks", "too many arguments: tasks; did you mean 'list'?"),
        ("periodic puase tasks", "too many arguments: tasks; did you mean 'pause'?"),
        ("queues tasks --jsno", "no option is called '--jsno'; did you mean '--json'?"),
        ("queues tasks --app_dir=x", "no option is called '--app_dir'; did you mean '--app-dir'?"),
        ("worker tasks -Z 3", "no option is called '-Z'"),
        ("xyzzyx", "no command is called 'xyzzyx'"),
    ],
)
def test_misspelt_word_is_answered_with_the_likely_one(
    words: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2

    assert capsys.readouterr().err.startswith(f"machinery: {text} (see: machinery")


@pytest.mark.parametrize(
    "words",
    [
        ["redis://u:geheim@host/0"],
        ["geheim@host"],
        ["dead", "redis://u:geheim@host/0"],
        ["queues", "tasks", "--broker=redis://u:geheim@host/0"],
        ["queues", "tasks", "--redis://u:geheim@host/0"],
    ],
)
def test_misspelt_word_that_may_be_a_url_is_masked(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2

    assert "geheim" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["wrker"],
        ["worker"],
        ["worker", "tasks", "-p", "0"],
        ["purge", "tasks"],
        ["show", "a", "b", "c"],
        ["dead"],
        ["worker", "tasks", "--nothing"],
        ["worker", "tasks", "-Q", ","],
        ["tasks", "tasks", "--since", "soon"],
        ["tasks", "tasks", "--state", "lost"],
    ],
)
def test_wrong_words_are_one_line_and_exit_code_2(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2

    assert re.fullmatch(r"machinery: .+ \(see: machinery.* --help\)\n", capsys.readouterr().err)


def test_without_words_there_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2

    assert "commands:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "app_of_environment", "least", "most", "expected"),
    [
        (["tasks"], "", 0, 0, ("tasks", [])),
        ([], "tasks", 0, 0, ("tasks", [])),
        (["other"], "tasks", 0, 0, ("other", [])),
        (["task_1"], "tasks", 1, 1, ("tasks", ["task_1"])),
        (["other", "task_1"], "tasks", 1, 1, ("other", ["task_1"])),
        (["add", "1"], "tasks", 1, None, ("tasks", ["add", "1"])),
        (["tasks", "add", "1"], "tasks", 1, None, ("tasks", ["add", "1"])),
        (["tasks"], "tasks", 1, None, ("tasks", ["tasks"])),
        (["tasks", "add", "1"], "", 1, None, ("tasks", ["add", "1"])),
    ],
)
def test_first_word_is_the_app_unless_the_environment_has_one(
    words: list[str],
    app_of_environment: str,
    least: int,
    most: int | None,
    expected: tuple[str, list[str]],
) -> None:
    assert split_words(words, app_of_environment, least=least, most=most) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90", 90.0),
        ("1.5s", 1.5),
        ("500ms", 0.5),
        ("10m", 600.0),
        ("1h", 3600.0),
        ("2d", 172800.0),
    ],
)
def test_lengths_of_time_have_units(text: str, expected: float) -> None:
    assert seconds(text) == expected


def test_options_may_stand_between_the_words() -> None:
    parsed = command_parser(COMMANDS["send"]).parse_intermixed_args(
        ["tasks", "--wait", "add", "-5", "--", "-x"]
    )

    assert parsed.words == ["tasks", "add", "-5", "-x"]
    assert parsed.wait


def test_argument_parser_loads_no_modules_of_commands() -> None:
    code = (
        "import sys, machinery_py; old = set(sys.modules); "
        "import machinery_py.cli.main; print(*set(sys.modules) - old)"
    )

    loaded = set(
        subprocess.run(
            [sys.executable, "-c", code], text=True, capture_output=True, check=True
        ).stdout.split()
    )

    assert loaded.isdisjoint(
        {
            "sqlite3",
            "subprocess",
            "http.server",
            "ctypes",
            "machinery_py.cli.worker",
            "machinery_py.cli.apps",
        }
    )


def test_the_reference_names_every_command_and_option() -> None:
    text = REFERENCE.read_text()
    section = re.compile(
        r"^### `machinery ([a-z ]+?)(?: [A-Z\[][^\n`]*)?`\n(.*?)(?=^###? |\Z)",
        re.MULTILINE | re.DOTALL,
    )
    sections = dict(section.findall(text))

    assert sections.keys() == COMMANDS.keys()
    for name, command in COMMANDS.items():
        options = {
            option
            for action in command_parser(command)._actions
            if action.help != "==SUPPRESS=="
            for option in action.option_strings
            if option not in ("-h", "--help")
        }
        assert options == set(
            re.findall(r"(?<![\w-])--?[A-Za-z][a-z-]*(?=[` ,])", sections[name].partition("```")[0])
        ), name


# The app


def test_a_module_with_one_server_needs_no_name(app: App) -> None:
    assert app.run("queues", "tasks").stdout.startswith("QUEUE")
    assert app.run("queues", "tasks:server").stdout.startswith("QUEUE")


def test_the_environment_may_name_the_app(app: App) -> None:
    app.run("queues", MACHINERY_APP="tasks")


def test_app_is_imported_from_app_dir(app: App) -> None:
    app.write("inner/shop.py", "from machinery_py import Server\nserver = Server()\n")

    app.run("queues", "shop", "--app-dir", "inner")


def test_a_module_of_another_package_is_found_by_its_dots(app: App) -> None:
    app.write("shop/__init__.py", "")
    app.write("shop/tasks.py", "from machinery_py import Server\nserver = Server()\n")

    app.run("queues", "shop.tasks")


def test_a_server_under_two_names_is_one(app: App) -> None:
    app.write("one.py", "from tasks import server\nalias = server\n")

    app.run("queues", "one")


@pytest.mark.parametrize(
    ("name", "source", "words", "text"),
    [
        (
            "shop/tasks.py",
            "x = 1",
            ["worker", "shop.tasks"],
            "module 'shop.tasks': no Server found (name it: machinery worker shop.tasks:my_server)",
        ),
        (
            "shop/tasks.py",
            "from machinery_py import Server\nserver = Server()\nbatch = Server()",
            ["worker", "shop.tasks"],
            "module 'shop.tasks': 2 Servers, 'server' and 'batch' "
            "(pick one: machinery worker shop.tasks:server)",
        ),
        (
            "x.py",
            "",
            ["worker", "task"],
            "cannot import 'task' from ~/shop: no such module (there is 'tasks'; "
            "run from the folder that holds it or pass --app-dir)",
        ),
        (
            "x.py",
            "",
            ["worker", "tasks.py"],
            "cannot import 'tasks.py' from ~/shop: no such module (there is 'tasks'; "
            "run from the folder that holds it or pass "
            "--app-dir)",
        ),
        (
            "x.py",
            "",
            ["worker", "./tasks.py"],
            "app './tasks.py': found a path "
            "(expected MODULE or MODULE:OBJECT: machinery worker tasks)",
        ),
        (
            "x.py",
            "",
            ["send", "shop/tasks.py:server", "add"],
            "app 'shop/tasks.py:server': found a path "
            "(expected MODULE or MODULE:OBJECT: machinery send tasks:server --app-dir shop)",
        ),
        (
            "x.py",
            "",
            ["worker", "quite.else"],
            "cannot import 'quite.else' from ~/shop: no such module "
            "(run from the folder that holds it or pass --app-dir)",
        ),
        (
            "x.py",
            "",
            ["worker", "tasks", "--app-dir", "gone"],
            "cannot import 'tasks' from ~/shop/gone: no such folder (see --app-dir)",
        ),
        ("x.py", "", ["worker", "tasks:srv"], "module 'tasks': no 'srv' in it (there is 'server')"),
        (
            "x.py",
            "",
            ["worker", "tasks:add"],
            "module 'tasks': 'add' is a Task (expected a Server)",
        ),
        (
            "x.py",
            "from machinery_py import Server\nServer('reddis://h')",
            ["worker", "x"],
            "unknown scheme 'reddis'",
        ),
        (
            "x.py",
            "",
            ["send", "tasks", "ad", "1"],
            "task 'ad' is not registered "
            "(registered: add, boom, chat, greet, hold, note; did you mean 'add'?)",
        ),
        ("x.py", "", ["send", "tasks", "add", "1"], "add: missing argument 'b'"),
    ],
)
def test_error_of_the_app_is_one_line(
    app: App, name: str, source: str, words: list[str], text: str
) -> None:
    app.write(name, source)

    done = app.run(*words, code=2)

    assert done.stdout == ""
    assert done.stderr.startswith("machinery: ")
    assert done.stderr.count("\n") == 1
    assert text in done.stderr
    if words[0] == "worker" and len(text) > 40:
        assert done.stderr == f"machinery: {text}\n"


def test_the_hint_names_the_command_that_was_typed(app: App) -> None:
    app.write("two.py", "from machinery_py import Server\na = Server()\nb = Server()\n")

    assert "(pick one: machinery queues two:a)" in app.run("queues", "two", code=2).stderr


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "import taskz_that_is_missing",
            "ModuleNotFoundError: No module named 'taskz_that_is_missing'",
        ),
        ("from tasks import nothing_like_it", "ImportError: cannot import name 'nothing_like_it'"),
        ("def broken(:\n", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_an_error_inside_the_module_is_shown_whole(app: App, source: str, text: str) -> None:
    app.write("mine.py", f"\n\n{source}\n")

    done = app.run("worker", "mine", code=2)

    assert text in done.stderr
    assert 'mine.py", line 3' in done.stderr
    assert "importlib" not in done.stderr
    assert "cli/apps.py" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("machinery: cannot import 'mine' from ~/shop: ")


def test_a_script_that_ends_itself_is_told_so(app: App) -> None:
    app.write("script.py", "import sys\nsys.exit(0)\n")

    assert 'if __name__ == "__main__":' in app.run("worker", "script", code=2).stderr


def test_task_name_does_not_depend_on_the_importer(app: App) -> None:
    app.write(
        "script.py",
        "from machinery_py import Server\nserver = Server()\n"
        "@server.task\ndef mail() -> None: ...\n"
        "if __name__ == '__main__':\n    print(mail.send().uuid)\n",
    )
    uuid = app.python("script.py")

    app.run("worker", "script", "--burst")

    assert app.json("result", "script", uuid)["state"] == "SUCCESS"


# Stores


def test_a_store_that_cannot_be_used_is_exit_code_3(app: App) -> None:
    app.write("letter.db", "Dear Sir or Madam, " * 100)

    for words in (["worker", "tasks"], ["queues", "tasks"], ["send", "tasks", "add", "1", "2"]):
        done = app.run(*words, code=3, MACHINERY_URL="sqlite:///letter.db")

        assert "it is no SQLite database" in done.stderr
        assert done.stderr.splitlines()[-1].startswith("machinery: ")
        assert "Traceback" not in done.stderr


def test_error_of_a_broker_that_is_down_says_what_to_do(app: App) -> None:
    app.write(
        "down.py",
        """
from machinery_py import BrokerUnavailable, Server
server = Server()
def stats():
    raise BrokerUnavailable("broker redis://localhost:6379/0: connection refused")
server.broker.stats = stats
""",
    )

    assert app.run("queues", "down", code=3).stderr == (
        "machinery: broker redis://localhost:6379/0: connection refused "
        "(is it running? machinery doctor down)\n"
    )


def test_an_embedded_store_can_be_forbidden(app: App) -> None:
    assert (
        "a server is required"
        in app.run("worker", "tasks", code=2, MACHINERY_REQUIRE_SERVER="1").stderr
    )


def test_a_reader_that_goes_away_is_no_error(app: App) -> None:
    done = subprocess.run(
        f"{sys.executable} -m machinery_py config tasks --json | head -1",
        shell=True,
        cwd=app.folder,
        env=app.env,
        text=True,
        capture_output=True,
        check=False,
    )

    assert done.stdout == "[\n"
    assert done.stderr == ""


# Output that nobody reads


def shell(app: App, line: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash, in which `machinery` is the program; `$?` of the pipe's first part."""
    program = f'machinery() {{ {sys.executable} -m machinery_py "$@"; }}; {line}'
    return subprocess.run(
        ["bash", "-c", f"{program}; exit ${{PIPESTATUS[0]}}"],
        cwd=app.folder,
        env=app.env,
        text=True,
        capture_output=True,
        check=False,
        timeout=HANG,
    )


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("machinery queues tasks | true", 0),
        ("machinery worker --help | true", 0),
        ("machinery queues tasks >&-", 0),
        ("machinery queues none 2>&1 | true", 2),
        ("machinery queues none 2>&-", 2),
        ("machinery queues --none 2>&1 | true", 2),
        ("machinery queues tasks >/dev/full", 2),
        ("machinery config tasks --json >/dev/full", 2),
    ],
)
@pytest.mark.parametrize("buffered", ["", "1"])
def test_output_that_cannot_be_written_is_no_traceback(
    app: App, line: str, code: int, buffered: str
) -> None:
    app.env["PYTHONUNBUFFERED"] = buffered
    done = shell(app, line)

    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert done.returncode == code, done.stderr
