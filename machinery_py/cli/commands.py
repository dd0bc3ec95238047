"""The commands: what they take, their options, their examples, and the function behind each.

Argparse does not tell a command's words apart: with MACHINERY_APP set, the first of them need not be
the app (`split_words`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from machinery_py.cli.options import (
    ALL,
    APP,
    CHANGE,
    DEAD,
    FAILURE,
    FILTER,
    HEALTH,
    JSON,
    LIMIT,
    SEND,
    STATE,
    WAIT,
    WORKER,
    YES,
    Options,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command.

    Attributes:
        target: `file:function` under machinery_py.cli, which returns the exit code.
        words: what follows the app, as shown in the usage line: `NAME`, `NAME …` or `[NAME …]`.
        options: besides `--app-dir` and, except for `worker`, `--json`.
        opens_app: whether the function is called with the app's Server and the parsed arguments, or
            with the arguments alone.
    """

    name: str
    help: str
    target: str
    examples: Sequence[str]
    words: str = ""
    options: Options = ()
    opens_app: bool = True

    @property
    def least(self) -> int:
        """How many words the command needs."""
        return sum(word[0].isalpha() for word in self.words.split())

    @property
    def most(self) -> int | None:
        """How many words the command takes; None is any number."""
        return None if "…" in self.words else self.least

    @property
    def all_options(self) -> Options:
        return self.options + (() if self.name == "worker" else JSON) + APP


def split_words(
    words: Sequence[str], app: str, *, least: int = 0, most: int | None = 0
) -> tuple[str, list[str]]:
    """Return the app and the other words. `app`: the value of MACHINERY_APP, or "".

    With MACHINERY_APP set, the first word is the app only if there is one word more than the command
    takes, or, where it takes any number, if it is the same app.

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
        raise ValueError("which application? name the module of your Server, or set MACHINERY_APP")
    if len(rest) < least:
        raise ValueError("too few words")
    if most is not None and len(rest) > most:
        raise ValueError(f"too many words: {' '.join(rest[most:])}")
    return app, rest


COMMANDS: Mapping[str, Command] = {
    command.name: command
    for command in (
        Command(
            name="worker",
            target="worker:worker",
            options=WORKER,
            opens_app=False,
            help="run tasks",
            examples=(
                "machinery worker tasks                      a module with one Server in it",
                "machinery worker shop.tasks:server          which one, if there are several",
                "machinery worker tasks -c 20                20 threads",
                "machinery worker tasks -p 4 -c 10           4 processes of 10 threads",
                "machinery worker tasks -Q high,default,low  strictly in this order",
                "machinery worker tasks -Q high:6,low:1      by weights: six claims in seven begin with high",
                "machinery worker tasks --reload             restart when a file changes (development)",
                "machinery worker tasks --burst              until the queues are empty",
            ),
        ),
        Command(
            name="send",
            target="tasks:send",
            words="TASK [ARGUMENT …]",
            options=WAIT + SEND,
            help="send a task; arguments are JSON, or else strings",
            examples=(
                "machinery send tasks add 20 22 --wait",
                "machinery send tasks send_welcome ada@example.com --kw lang='\"fr\"' --delay 10m",
            ),
        ),
        Command(
            name="result",
            target="tasks:result",
            words="UUID",
            options=WAIT,
            help="the result of a task that was sent",
            examples=(
                "machinery result tasks task_0f6c",
                "machinery result tasks task_0f6c --wait --timeout 10s",
            ),
        ),
        Command(
            name="queues",
            target="queues:queues",
            help="queues, and how full they are",
            examples=("machinery queues tasks", "machinery queues tasks --json"),
        ),
        Command(
            name="tasks",
            target="tasks:tasks",
            options=STATE + FILTER + LIMIT,
            help="tasks, the newest first",
            examples=(
                "machinery tasks tasks",
                "machinery tasks tasks --state failure --name charge --since 1h",
            ),
        ),
        Command(
            name="show",
            target="tasks:show",
            words="UUID",
            help="all that is known of a task; the start of a UUID is enough",
            examples=("machinery show tasks task_0f6c",),
        ),
        Command(
            name="workers",
            target="queues:workers",
            help="the workers that live",
            examples=("machinery workers tasks",),
        ),
        Command(
            name="retry",
            target="tasks:retry",
            words="[UUID …]",
            options=FAILURE + FILTER + YES,
            help="send failed tasks again",
            examples=(
                "machinery retry tasks task_0f6c",
                "machinery retry tasks --state failure --name charge --since 1h",
            ),
        ),
        Command(
            name="revoke",
            target="tasks:revoke",
            words="UUID …",
            options=YES,
            help="never start these tasks; ask those that run to stop",
            examples=("machinery revoke tasks task_0f6c",),
        ),
        Command(
            name="purge",
            target="queues:purge",
            words="QUEUE",
            options=YES,
            help="delete what waits in a queue, delayed tasks too",
            examples=("machinery purge tasks mail",),
        ),
        Command(
            name="declare",
            target="queues:declare",
            words="[QUEUE …]",
            help="make what queues need on the server, when an application is deployed",
            examples=("machinery declare tasks", "machinery declare tasks machinery_tasks mail"),
        ),
        Command(
            name="pause",
            target="queues:pause",
            words="QUEUE …",
            help="take nothing from these queues until they are resumed; what runs goes on",
            examples=("machinery pause tasks mail", "machinery pause tasks mail reports"),
        ),
        Command(
            name="resume",
            target="queues:resume",
            words="QUEUE …",
            help="take from these queues again",
            examples=("machinery resume tasks mail",),
        ),
        Command(
            name="dead list",
            target="dead_letters:list_dead",
            options=DEAD + LIMIT,
            help="messages that nobody could deal with",
            examples=("machinery dead list tasks",),
        ),
        Command(
            name="dead show",
            target="dead_letters:show_dead",
            words="ID",
            help="one dead letter, with its message",
            examples=("machinery dead show tasks 17",),
        ),
        Command(
            name="dead replay",
            target="dead_letters:replay_dead",
            words="[ID …]",
            options=ALL + DEAD + YES,
            help="put dead letters back into their queues",
            examples=(
                "machinery dead replay tasks 17",
                "machinery dead replay tasks --all --queue mail",
            ),
        ),
        Command(
            name="dead delete",
            target="dead_letters:delete_dead",
            words="[ID …]",
            options=ALL + DEAD + YES,
            help="delete dead letters",
            examples=("machinery dead delete tasks 17", "machinery dead delete tasks --all --yes"),
        ),
        Command(
            name="periodic",
            target="periodic:periodic",
            help="schedules, with their last and next runs",
            examples=("machinery periodic tasks", "machinery periodic pause tasks digest"),
        ),
        Command(
            name="periodic pause",
            target="periodic:pause",
            words="NAME …",
            options=YES,
            help="send nothing until it is resumed, also after a restart",
            examples=("machinery periodic pause tasks digest",),
        ),
        Command(
            name="periodic resume",
            target="periodic:resume",
            words="NAME …",
            options=YES,
            help="send again, from now on",
            examples=("machinery periodic resume tasks digest",),
        ),
        Command(
            name="periodic run",
            target="periodic:run",
            words="NAME …",
            options=YES,
            help="send it once, now; its times stay",
            examples=("machinery periodic run tasks digest",),
        ),
        Command(
            name="periodic change",
            target="periodic:change",
            words="NAME",
            options=CHANGE,
            help="change a schedule, until the code that declares it changes",
            examples=(
                "machinery periodic change tasks digest --spec '30 6 * * *' --tz Europe/Berlin",
            ),
        ),
        Command(
            name="periodic remove",
            target="periodic:remove",
            words="NAME …",
            options=YES,
            help="forget a schedule that no code declares any more",
            examples=("machinery periodic remove tasks digest",),
        ),
        Command(
            name="config",
            target="doctor:config",
            help="every setting, and where it comes from",
            examples=("machinery config tasks",),
        ),
        Command(
            name="doctor",
            target="doctor:doctor",
            opens_app=False,
            help="reachable? writable? clocks? versions?",
            examples=("machinery doctor tasks",),
        ),
        Command(
            name="health",
            target="health:health",
            options=HEALTH,
            opens_app=False,
            help="whether a worker lives here, for probes; imports nothing of yours",
            examples=("machinery health tasks", "machinery health tasks --ready --max-age 30s"),
        ),
    )
}

GROUPS: Mapping[str, str] = {
    "dead": "dead letters: messages that nobody could deal with",
    "periodic": "schedules, with their last and next runs; pause, resume, run, change, remove",
}
