"""The documentation is true: programs run, commands do what is shown, tables match the code."""

from __future__ import annotations

import ast
import datetime as dt
import enum
import inspect
import itertools
import json
import pathlib
import re
import shlex
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import yaml

import machinery_py
from machinery_py import errors, events
from machinery_py.cli.commands import COMMANDS, GROUPS, split_words
from machinery_py.cli.main import NO_APP, command_parser
from machinery_py.cli.options import seconds
from machinery_py.config.urls import SCHEMES
from machinery_py.control.stream import EventStream, ServerEvents
from machinery_py.dashboard.dashboard import Dashboard
from machinery_py.inspection import Inspector
from machinery_py.limits.limiter import Limiter
from machinery_py.locks.named import NamedLock
from machinery_py.registry.hooks import Hooks
from machinery_py.schedules.api import Schedules
from machinery_py.stores import open as factory
from machinery_py.stores.open import FamilyOptions
from machinery_py.tasks import signature
from machinery_py.tasks.signature import Arg, Signature
from machinery_py.testing.clocks import ManualClock
from machinery_py.wire.signatures import encode_signature
from machinery_py.workflows.workflow import Workflow
from tests.docs import links
from tests.docs.drawn import DRAWN, redrawn, shape, shape_of_function
from tests.docs.pages import (
    HANG,
    OTHERS,
    ROOT,
    Shell,
    blocks,
    environment,
    machinery_commands,
    mentioned_commands,
    page_names,
    pattern_of,
    program,
    read,
)

PAGES = page_names()
OURS = [page for page in PAGES if page not in OTHERS]
DEPLOY = ROOT / "examples" / "deploy"


# Programs and commands


@pytest.mark.parametrize("page", [page for page in OURS if program(page)])
def test_the_programs_of_a_page_run(page: str, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "page.py"
    script.write_text(program(page))

    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )

    assert done.returncode == 0, f"{page} (the lines are the page's)\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize(
    "page",
    ["README.md", "docs/tutorial.md"]
    + [f"docs/how-to/{name}.md" for name in ("testing", "frameworks", "outbox")],
)
def test_commands_of_a_page_print_its_output(page: str, tmp_path: pathlib.Path) -> None:
    with Shell(tmp_path) as shell:
        shell.follow(page)


def test_the_quickstart_is_the_example(tmp_path: pathlib.Path) -> None:
    [shown] = [block for block in blocks("README.md", "python") if block.file == "tasks.py"]

    assert shown.text == read("examples/quickstart/tasks.py")


def test_a_block_that_is_not_run_says_why() -> None:
    silent = [
        f"{block.page}:{block.line}"
        for page in OURS
        for block in blocks(page)
        if block.is_left_alone and not block.marks["not run"]
    ]

    assert not silent


def test_pattern_of_a_page_matches_only_its_output() -> None:
    pattern = pattern_of("task_0f6c37a1…  SUCCESS  42  (91 ms)\n")

    assert pattern.search("task_d1fceac4…  SUCCESS  42  (7 ms)\n")
    assert pattern.search("before\ntask_d1fceac4…  SUCCESS  42  (1.2 s)\n")
    assert not pattern.search("task_d1fceac4…  FAILURE  42  (7 ms)\n")
    assert not pattern.search("task_d1fceac4…  SUCCESS  142  (7 ms)\n")
    assert not pattern_of("5\n").search("15\n")


def shown_commands() -> Iterator[tuple[str, list[str]]]:
    for page in PAGES:
        for words in machinery_commands(read(page)):
            yield page, words
    unit = (DEPLOY / "machinery-worker.service").read_text()
    for line in re.findall(r"^ExecStart=\S+/machinery (.*)$", unit, re.MULTILINE):
        yield "machinery-worker.service", shlex.split(line)
    for line in re.findall(
        r"^(?:HEALTHCHECK .*)?CMD (\[.*\])$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE
    ):
        yield "Dockerfile", json.loads(line)[1:]
    for command in kubernetes_commands():
        yield "kubernetes.yaml", command[1:]


def test_every_command_that_is_shown_exists_with_its_options() -> None:
    shown = list(shown_commands())
    assert len(shown) > 25
    for page, line in shown:
        words = list(itertools.takewhile(lambda word: word not in (">", "|"), line))
        name = " ".join(words[:2]) if " ".join(words[:2]) in COMMANDS else words[0]
        if name.startswith("-") or name == "COMMAND":
            continue  # of machinery itself; or the grammar
        command = COMMANDS.get(name)
        assert command is not None, f"{page}: no command {name!r}"
        try:
            args = command_parser(command).parse_intermixed_args(words[len(name.split()) :])
        except SystemExit:
            pytest.fail(f"{page}: machinery {shlex.join(words)}")
        given = args.words if command.takes_app else [NO_APP, *args.words]
        split_words(given, "", least=command.least, most=command.most)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_that_is_mentioned_exists_with_its_options(page: str) -> None:
    for words in mentioned_commands(read(page)):
        shown = f"{page}: machinery {shlex.join(words)}"
        if words[0].startswith("-") or words in [[group] for group in GROUPS]:
            continue  # of machinery itself, or the name of several
        name = next((one for one in (" ".join(words[:2]), words[0]) if one in COMMANDS), "")
        assert name, f"{shown}: no such command"
        parser, rest = command_parser(COMMANDS[name]), words[len(name.split()) :]
        flags = {flag for action in parser._actions for flag in action.option_strings}
        assert {one for one in rest if one.startswith("-")} <= flags, shown
        if all(one.startswith("-") for one in rest):
            continue  # a name, and options without their values
        # A sentence may leave the app out, as it does the program's own words.
        for given in (rest, ["tasks", *rest]):
            try:
                args = parser.parse_intermixed_args(given)
                split_words(args.words, "", least=COMMANDS[name].least, most=COMMANDS[name].most)
            except (SystemExit, ValueError):
                continue
            break
        else:
            pytest.fail(shown)


# Links and names


def anchors(page: str) -> set[str]:
    heads = re.findall(
        r"^#+ (.*)$", re.sub(r"```.*?```", "", read(page), flags=re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", OURS)
def test_links_lead_somewhere(page: str) -> None:
    text = re.sub(r"```.*?```", "", read(page), flags=re.DOTALL)
    broken = []
    for target in (links.local(one, links.repository()) for one in links.targets(text)):
        if links.is_outside(target):
            continue
        path, _, anchor = target.partition("#")
        found = (ROOT / page).parent / path if path else ROOT / page
        if not found.exists() or (
            anchor and anchor not in anchors(str(found.resolve().relative_to(ROOT)))
        ):
            broken.append(target)

    assert not broken


def test_every_page_can_be_reached() -> None:
    seen, waiting = set[str](), ["README.md"]
    while waiting:
        page = waiting.pop()
        if page in seen:
            continue
        seen.add(page)
        for link in links.targets(read(page)):
            target = links.local(link, links.repository()).partition("#")[0]
            if target.endswith(".md") and not links.is_outside(target):
                waiting.append(str(((ROOT / page).parent / target).resolve().relative_to(ROOT)))

    assert {page for page in OURS if page.startswith("docs/")} <= seen


def test_links_of_the_readme_on_an_index_are_absolute_and_valid() -> None:
    named = links.repository()
    base = named or "https://host.example/owner/machinery_py"

    shown = links.absolute(read("README.md"), base)

    assert not named or shown == read("README.md"), "run: python -m tests.docs.links"
    assert [one for one in links.targets(shown) if not links.is_outside(one)] == []
    inside = [one for one in links.targets(shown) if one.startswith(base)]
    assert len(inside) > 15
    for one in inside:
        path = ROOT / links.local(one, base).partition("#")[0]
        assert path.is_dir() if "/tree/" in one else path.is_file(), one
        assert ("/raw/" in one) is (path.suffix == ".png"), one  # a page is no picture


def test_address_of_the_repository_is_replaced_everywhere(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("setup.cfg", "README.md"):
        (tmp_path / name).write_text(read(name), encoding="utf-8")
    monkeypatch.setattr(links, "ROOT", tmp_path)
    links.main("https://old.example/a/b")

    links.main("https://new.example/c/d/")

    assert links.repository() == "https://new.example/c/d"
    for name in ("setup.cfg", "README.md"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert "https://new.example/c/d/" in text
        assert "old.example" not in text
        assert text.count("project_urls") == (name == "setup.cfg")


def test_files_and_tests_that_are_named_are_there() -> None:
    code = "\n".join(
        path.read_text()
        for folder in ("tests", "machinery_py/testing")
        for path in sorted((ROOT / folder).rglob("*.py"))
    )
    missing = []
    for page in OURS:
        text = read(page)
        for path in re.findall(r"`((?:machinery_py|tests|examples|docs)/[\w./-]+)`", text):
            if not (ROOT / path).exists():
                missing.append(f"{page}: {path}")
        for name in re.findall(r"`(test_\w+)`", text):
            if f"def {name}(" not in code:
                missing.append(f"{page}: {name}")

    assert not missing


def test_make_targets_that_are_named_are_there() -> None:
    makefile = read("Makefile")
    named = {name for page in OURS for name in re.findall(r"(?:`|\$ )make (\w+)", read(page))}

    assert {"demo", "test"} <= named
    assert all(re.search(rf"^{name}:", makefile, re.MULTILINE) for name in named), named


# The reference pages against the code


def test_every_public_name_is_in_the_api() -> None:
    words = set(
        re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", read("docs/reference/api.md"))))
    )

    assert set(machinery_py.__all__) <= words


def test_the_methods_of_the_api_have_these_parameters() -> None:
    owners: dict[str, type] = {
        name: one
        for name in machinery_py.__all__
        if isinstance(one := getattr(machinery_py, name), type)
    }
    owners |= {"Inspector": Inspector, "Schedules": Schedules, "NamedLock": NamedLock}
    owners |= {"Dashboard": Dashboard, "Workflow": Workflow}
    owners |= {"Limiter": Limiter}
    owners |= {"ServerEvents": ServerEvents, "EventStream": EventStream}
    wrong, count = [], 0
    for shown in re.findall(r"^\| `([^`]+)` \|", read("docs/reference/api.md"), re.MULTILINE):
        owner, dot, rest = shown.partition(".")
        name = re.split(r"\W", rest)[0]
        if dot and owner in owners:
            found = owners[owner]
            # Decorators of handlers, which Server has as attributes.
            found = found if hasattr(found, name) else Hooks
            actual = shape(found, name).replace("Hooks.", f"{owner}.")
        elif "(" in shown:
            actual = shape_of_function(getattr(machinery_py, shown.partition("(")[0]))
        else:
            continue
        count += 1
        if actual != shown:
            wrong.append(f"shown: {shown}\n   is: {actual}")

    assert not wrong, "\n".join(wrong)
    assert count > 70  # the rows were found


def events_of() -> list[type[events.Event]]:
    return [
        one
        for _, one in inspect.getmembers(events, inspect.isclass)
        if issubclass(one, events.Event)
    ]


def test_every_event_is_there_with_its_fields() -> None:
    rows = dict(
        re.findall(
            r"^\| `(\w+)` \| .* \| (.*?) ?\|$", read("docs/reference/events.md"), re.MULTILINE
        )
    )

    assert rows.keys() == {one.__name__ for one in events_of()}
    in_stream = {"at", "host", "pid", "clock"}
    for one in events_of():
        fields = set(one.__struct_fields__) - in_stream
        assert set(re.findall(r"`(\w+)`", rows[one.__name__])) == fields, one


def errors_of() -> list[type[BaseException]]:
    return [
        one
        for _, one in inspect.getmembers(errors, inspect.isclass)
        if issubclass(one, errors.MachineryError) and one.__module__ == errors.__name__
    ]


def test_the_tree_of_errors_is_that_of_the_classes() -> None:
    [tree] = blocks("docs/reference/errors.md", "text")
    path: list[str] = []
    found: dict[str, set[str]] = {}
    for line in tree.text.splitlines():
        head = re.match(r"(?P<lead>[│├└─ ]*)(?P<name>\w+)(?: \((?P<builtin>\w+)\))?", line)
        assert head is not None, line
        depth = len(head["lead"]) // 4
        path[depth:] = [head["name"]]
        found[head["name"]] = (
            {*path[depth - 1 : depth], *filter(None, [head["builtin"]])} if depth else {"Exception"}
        )

    assert found == {one.__name__: {base.__name__ for base in one.__bases__} for one in errors_of()}


def test_every_error_has_a_row() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", read("docs/reference/errors.md"), re.MULTILINE)

    assert set(rows) == {one.__name__ for one in errors_of()}
    assert len(rows) == len(set(rows))


@pytest.mark.parametrize("page", [page for page in PAGES if "\n<!-- drawn:" in read(page)])
def test_generated_parts_of_pages_are_current(page: str) -> None:
    assert redrawn(read(page)) == read(page), "run: python -m tests.docs.drawn"


def test_everything_that_can_be_drawn_is_somewhere() -> None:
    drawn = {
        name
        for page in PAGES
        for name in re.findall(r"^<!-- drawn: (.*) -->$", read(page), re.MULTILINE)
    }

    assert drawn == set(DRAWN)


def test_the_keys_and_headers_of_a_message_are_explained() -> None:
    text = read("docs/reference/wire-format.md")
    explained = {
        key
        for row in re.findall(r"^\| (`.*?`) \|", text, re.MULTILINE)
        for key in re.findall(r"`(\w+)`", row)
    }
    headers = {value for name, value in vars(signature).items() if name.startswith("HEADER_")}

    assert set(json.loads(encode_signature(Signature(name="a")))) | headers == explained


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Point:
    x: int
    y: int


def rows_of_types() -> list[tuple[str, str, str]]:
    return re.findall(
        r"^\| `(.*?)` \| `(.*?)` \| `(.*?)` \|$", read("docs/reference/types.md"), re.MULTILINE
    )


@pytest.mark.parametrize(("expression", "type_name", "wire"), rows_of_types())
def test_value_is_encoded_as_in_the_table(expression: str, type_name: str, wire: str) -> None:
    names: dict[str, Any] = {
        "Colour": Colour,
        "Point": Point,
        "dt": dt,
        "Decimal": Decimal,
        "UUID": UUID,
        "IPv4Address": IPv4Address,
        "Path": Path,
        "deque": deque,
    }
    value = eval(compile(ast.parse(expression, mode="eval"), "types.md", "eval"), names)

    body = encode_signature(Signature(name="a", args=[Arg.of(value)]))

    assert f'"Type":"{type_name}","Value":{wire}}}' in body.decode()


def test_every_store_has_its_row() -> None:
    text = read("docs/reference/stores.md")
    rows = re.findall(
        r"^\| `([\w+]+)` \| (\w+) \| (\w+) \| (\w+) \| (\w+) \| (\w+) \|", text, re.MULTILINE
    )

    assert {row[0] for row in rows} == set(factory.FAMILIES) == set(SCHEMES)
    for scheme, *claims in rows:
        urls = {
            "sqlite": "sqlite:///a.db",
            "memory": "memory://",
            "redis": "redis://h",
            "rediss": "rediss://h",
            "redis+socket": "redis+socket:///s",
            "amqp": "amqp://h",
            "amqps": "amqps://h",
            "memcache": "memcache://h",
            "mongodb": "mongodb://h",
            "mongodb+srv": "mongodb+srv://h",
            "postgres": "postgres://h",
            "postgresql": "postgresql://h",
        }
        url = str(urls.get(scheme, scheme))
        family = factory.open_family(url, FamilyOptions(clock=ManualClock()))
        store = family.backend().features
        sends = "broker" in SCHEMES[scheme]
        durable = (
            "yes"
            if store.durable
            else "messages"
            if sends and family.broker().features.durable
            else "no"
        )
        assert claims == [
            one if isinstance(one, str) else "yes" if one else "no"
            for one in (sends, True, durable, store.shared, family.together() is not None)
        ]


# Deployment


def kubernetes() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))


def kubernetes_commands() -> list[list[str]]:
    [pod] = [one["spec"]["template"]["spec"] for one in kubernetes() if one["kind"] == "Deployment"]
    [container] = pod["containers"]
    return [
        container["command"],
        *(container[probe]["exec"]["command"] for probe in ("livenessProbe", "readinessProbe")),
    ]


def shutdown_timeout(words: list[str]) -> float:
    return seconds(words[words.index("--shutdown-timeout") + 1])


def test_stop_waits_longer_than_the_workers_shutdown() -> None:
    unit = (DEPLOY / "machinery-worker.service").read_text()
    [start] = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    [stop] = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    [pod] = [one["spec"]["template"]["spec"] for one in kubernetes() if one["kind"] == "Deployment"]
    [docker] = re.findall(r"^CMD (\[.*\])$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    [docker_stop] = re.findall(r"docker stop --time (\d+)", (DEPLOY / "Dockerfile").read_text())

    # Twice: the last results get as long again when the store does not answer.
    assert int(stop) > 2 * shutdown_timeout(shlex.split(start))
    assert pod["terminationGracePeriodSeconds"] > 2 * shutdown_timeout(kubernetes_commands()[0])
    assert int(docker_stop) > 2 * shutdown_timeout(json.loads(docker))


def test_sqlite_has_one_pod_with_a_volume() -> None:
    [deployment] = [one["spec"] for one in kubernetes() if one["kind"] == "Deployment"]
    [claim] = [one for one in kubernetes() if one["kind"] == "PersistentVolumeClaim"]
    pod = deployment["template"]["spec"]

    assert deployment["replicas"] == 1
    assert deployment["strategy"] == {"type": "Recreate"}
    assert {
        "name": "data",
        "persistentVolumeClaim": {"claimName": claim["metadata"]["name"]},
    } in pod["volumes"]
    assert {"name": "data", "mountPath": "/data"} in pod["containers"][0]["volumeMounts"]


def test_the_fragments_have_a_number_and_a_kind() -> None:
    names = [path.name for path in (ROOT / "changelog.d").iterdir() if path.name != "README.md"]

    assert names
    assert all(
        re.fullmatch(r"\d+\.(added|changed|deprecated|removed|fixed|security)\.md", name)
        for name in names
    ), names
