"""The commands: what they take, their options, their examples, and the function behind each.

Argparse does not tell a command's words apart: with MACHINERY_APP set, the first of them need not
be the app (`split_words`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

from machinery_py.cli.options import (
    ALL,
    ANSWERS,
    APP,
    CHANGE,
    CONTROL,
    DASHBOARD,
    DEAD,
    EVENTS,
    EXPORTER,
    FAILURE,
    FILTER,
    FROM_START,
    HEALTH,
    JSON,
    LIMIT,
    MIGRATE,
    SEARCH,
    SEND,
    SIGNAL,
    STACK,
    STATE,
    TERMINATE,
    TOP,
    UNDECLARED,
    WAIT,
    WORKER,
    YES,
    Options,
)
from machinery_py.operations import BY_COMMAND, OPERATIONS, Kind

SERVING = ("worker", "dashboard", "exporter", "relay")  # commands that go on until they are stopped


@dataclass(frozen=True, slots=True)
class Command:
    """One command.

    Attributes:
        examples: what follows `machinery NAME`.
        words: what follows the app, as shown in the usage line: `NAME`, `NAME …` or `[NAME …]`.
        options: besides `--app-dir` and, except for SERVING, `--json`.
        opens_app: whether its function gets the Server and the arguments, or only these.
        takes_app: whether its first word is the app; else it has no option but `options`.
    """

    name: str
    _: KW_ONLY
    examples: Sequence[str]
    words: str = ""
    options: Options = ()
    opens_app: bool = True
    takes_app: bool = True

    @property
    def help(self) -> str:
        return BY_COMMAND[self.name].help

    @property
    def least(self) -> int:
        """How many words the command needs."""
        return sum(word[0].isalpha() for word in self.words.split())  # not those in brackets

    @property
    def most(self) -> int | None:
        """How many words the command takes; None is any number."""
        return None if "…" in self.words else len(self.words.split())

    @property
    def example_lines(self) -> list[str]:
        return [f"{self.name} {example}" for example in self.examples]

    @property
    def all_options(self) -> Options:
        if not self.takes_app:
            return self.options
        return self.options + (() if self.name in SERVING else JSON) + APP


def split_words(
    words: Sequence[str], app: str, *, least: int = 0, most: int | None = 0
) -> tuple[str, list[str]]:
    """Return the app and the other words. `app`: the value of MACHINERY_APP, or "".

    With MACHINERY_APP set, the first word is the app only if there is one word more than the
    command takes, or, where it takes any number, if it is the same app.

    Raises:
        ValueError: there are too few or too many words.
    """
    rest = list(words)
    if app:
        given = len(rest) > most if most is not None else len(rest) > least and rest[0] == app
        if given:
            app = rest.pop(0)
    elif rest:
        app = rest.pop(0)
    if not app:
        raise ValueError("no app (name the module of your Server, or set MACHINERY_APP)")
    if len(rest) < least:
        raise ValueError("too few arguments")
    if most is not None and len(rest) > most:
        raise ValueError(f"too many arguments: {' '.join(rest[most:])}")
    return app, rest


#: Module under machinery_py.cli → its commands. A command's function has its name.
_MODULES: Mapping[str, Sequence[Command]] = {
    "worker": (
        Command(
            "worker",
            options=WORKER,
            opens_app=False,
            examples=(
                "tasks                      run the tasks of tasks.py",
                "shop.tasks:server          which one, if there are several",
                "tasks -c 20                20 threads",
                "tasks -p 4 -c 10           4 processes of 10 threads",
                "tasks -Q high,low          strictly in this order",
                "tasks -Q high:6,low:1      by weights: six claims in seven begin with high",
                "tasks --reload             restart when a file changes (development)",
                "tasks --burst              until the queues are empty",
            ),
        ),
    ),
    "tasks": (
        Command(
            "send",
            words="TASK [ARGUMENT …]",
            options=WAIT + SEND,
            examples=(
                "tasks add 20 22 --wait",
                "tasks send_welcome ada@example.com --kw lang='\"fr\"' --delay 10m",
            ),
        ),
        Command(
            "result",
            words="UUID",
            options=WAIT,
            examples=("tasks task_0f6c", "tasks task_0f6c --wait --timeout 10s"),
        ),
        Command(
            "tasks",
            options=STATE + FILTER + SEARCH + LIMIT,
            examples=("tasks", "tasks --state failure --name charge --since 1h"),
        ),
        Command(
            "show",
            words="UUID",
            examples=("tasks task_0f6c",),
        ),
        Command(
            "why",
            words="UUID",
            options=STACK,
            examples=("tasks task_0f6c", "tasks task_0f6c --stack"),
        ),
        Command(
            "retry",
            words="[UUID …]",
            options=FAILURE + FILTER + FROM_START + YES,
            examples=("tasks task_0f6c", "tasks --state failure --name charge --since 1h"),
        ),
        Command(
            "signal",
            words="UUID NAME [VALUE]",
            options=SIGNAL,
            examples=(
                "tasks task_0f6c approval",
                """tasks task_0f6c approval '{"by": "ada"}' --key click-81""",
            ),
        ),
        Command(
            "revoke",
            words="[UUID …]",
            options=TERMINATE + YES,
            examples=(
                "tasks task_0f6c",
                "tasks task_0f6c --terminate",
                "tasks --header tenant=acme",
            ),
        ),
    ),
    "flow": (
        Command(
            "flow",
            words="UUID [ACTION …]",
            options=YES,
            examples=("tasks flow_81c2", "tasks flow_81c2 retry", "tasks flow_81c2 cancel --yes"),
        ),
    ),
    "queues": (
        Command("queues", examples=("tasks", "tasks --json")),
        Command(
            "forget",
            words="QUEUE …",
            examples=("tasks mail-of-1837",),
        ),
        Command(
            "workers",
            options=(ANSWERS,),
            examples=("tasks",),
        ),
        Command(
            "purge",
            words="QUEUE",
            options=YES,
            examples=("tasks mail",),
        ),
        Command(
            "declare",
            words="[QUEUE …]",
            examples=("tasks", "tasks machinery_tasks mail"),
        ),
        Command(
            "pause",
            words="QUEUE …",
            examples=("tasks mail", "tasks mail reports"),
        ),
        Command("resume", words="QUEUE …", examples=("tasks mail",)),
    ),
    "limits": (
        Command(
            "limits",
            examples=("tasks", "set tasks call_api rate=10/s"),
        ),
        Command(
            "limits set",
            words="NAME LIMIT=VALUE …",
            examples=(
                "tasks call_api rate=10/s burst=20",
                "tasks import_feed max_running=3",
                "tasks limiter:smtp min_interval=500ms",
            ),
        ),
        Command(
            "limits reset",
            words="NAME …",
            examples=("tasks call_api",),
        ),
    ),
    "watch": (
        Command(
            "events",
            words="[EVENT …]",
            options=EVENTS,
            examples=("tasks", "tasks TaskFailed WorkerOffline --json", "tasks --since 5m"),
        ),
        Command(
            "top",
            options=TOP,
            examples=("tasks", "tasks --once"),
        ),
    ),
    "dashboard": (
        Command(
            "dashboard",
            options=DASHBOARD,
            examples=(
                "tasks                      http://127.0.0.1:8765/",
                "tasks --host 0.0.0.0       with MACHINERY_DASHBOARD_AUTH=user:password",
                "tasks --read-only --port 9000",
            ),
        ),
    ),
    "exporter": (
        Command(
            "exporter",
            options=EXPORTER,
            examples=("tasks", "tasks --events --host 0.0.0.0"),
        ),
    ),
    "relay": (
        Command(
            "relay",
            examples=("tasks",),
        ),
    ),
    "control": (
        Command(
            "control",
            words="ORDER [ARGUMENT …]",
            options=CONTROL,
            examples=(
                "tasks ping",
                "tasks active --worker 'web-*'",
                "tasks stack --worker web-1",
                "tasks set-concurrency 8",
            ),
        ),
    ),
    "dead_letters": (
        Command(
            "dead",
            options=DEAD + LIMIT,
            examples=("tasks", "replay tasks 17"),
        ),
        Command("dead show", words="ID", examples=("tasks 17",)),
        Command(
            "dead replay",
            words="[ID …]",
            options=ALL + DEAD + FROM_START + YES,
            examples=("tasks 17", "tasks --all --queue mail"),
        ),
        Command(
            "dead delete",
            words="[ID …]",
            options=ALL + DEAD + YES,
            examples=("tasks 17", "tasks --all --yes"),
        ),
    ),
    "periodic": (
        Command(
            "periodic",
            examples=("tasks", "pause tasks digest"),
        ),
        Command(
            "periodic pause",
            words="NAME …",
            options=YES,
            examples=("tasks digest",),
        ),
        Command(
            "periodic resume",
            words="NAME …",
            options=YES,
            examples=("tasks digest",),
        ),
        Command(
            "periodic run",
            words="NAME …",
            options=YES,
            examples=("tasks digest",),
        ),
        Command(
            "periodic change",
            words="NAME",
            options=CHANGE,
            examples=("tasks digest --spec '30 6 * * *' --tz Europe/Berlin",),
        ),
        Command(
            "periodic remove",
            words="[NAME …]",
            options=UNDECLARED + YES,
            examples=("tasks digest", "tasks --undeclared"),
        ),
    ),
    "migrate": (
        Command(
            "migrate",
            options=MIGRATE,
            examples=("tasks", "tasks --sql"),
        ),
    ),
    "doctor": (
        Command("config", examples=("tasks",)),
        Command(
            "doctor",
            opens_app=False,
            examples=("tasks",),
        ),
    ),
    "health": (
        Command(
            "health",
            options=HEALTH,
            opens_app=False,
            examples=("tasks", "tasks --ready --max-age 30s"),
        ),
    ),
    "completion": (
        Command(
            "completion",
            words="SHELL",
            opens_app=False,
            takes_app=False,
            examples=(
                "bash > ~/.local/share/bash-completion/completions/machinery",
                "zsh > ~/.zfunc/_machinery",
                "fish > ~/.config/fish/completions/machinery.fish",
            ),
        ),
    ),
}

COMMANDS = {command.name: command for commands in _MODULES.values() for command in commands}
MODULE_OF = {one.name: module for module, commands in _MODULES.items() for one in commands}

#: Commands with others below them; by itself each lists.
GROUPS: Mapping[str, str] = {
    "limits": "limits of tasks, and what runs and waits by them; set, reset",
    "dead": "messages that no worker could run; show, replay, delete",
    "periodic": "schedules with their last and next runs; pause, resume, run, change, remove",
}

#: The sections of the help.
SECTIONS: Mapping[str, Sequence[str]] = {
    kind: [
        one.command
        for one in OPERATIONS
        if one.kind is kind and one.command in COMMANDS and " " not in one.command
    ]
    for kind in Kind
}
