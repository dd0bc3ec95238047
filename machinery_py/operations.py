"""Operations on an application: what each does, as a command and as a route of the JSON API.

`machinery_py.cli.commands` and `machinery_py.dashboard.api` take kind and help from here, and add
what they alone have: words and options, fields and answers. These differ on purpose: a command
takes several queues and asks before it deletes; a route takes one, and the number that was
confirmed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum


class Kind(StrEnum):
    """A section of the help, and the right that a user of the dashboard needs."""

    RUN = "run"  # goes on until it is stopped
    LOOK = "look"  # changes nothing
    ACT = "act"  # refused by a dashboard that is read-only


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation.

    Attributes:
        help: what it does, as help and documentation show it.
        command: what follows `machinery`; "": the command line does not have it. Of `flow` and
            `control` the second word is an argument.
        route: method and path in the JSON API; "": it does not have it.
    """

    kind: Kind
    help: str
    _: KW_ONLY
    command: str = ""
    route: str = ""


def _run(help: str, command: str) -> Operation:
    return Operation(Kind.RUN, help, command=command)


def _look(help: str, command: str = "", route: str = "") -> Operation:
    return Operation(Kind.LOOK, help, command=command, route=route)


def _act(help: str, command: str = "", route: str = "") -> Operation:
    return Operation(Kind.ACT, help, command=command, route=route)


#: In the order of the help.
OPERATIONS = (
    _run("run tasks", "worker"),
    _run("serve a page that shows and changes queues, tasks, schedules and workers", "dashboard"),
    _run("serve metrics of queues and workers to Prometheus", "exporter"),
    _run("publish what the app's outbox keeps in its database", "relay"),
    _look("show the state of the whole, at most a second old", route="GET overview"),
    _look("count the tasks that ended in each step of a time", route="GET history"),
    _look("show the routes, and JSON Schemas of what they take and give", route="GET schema"),
    _look("list queues, and how full they are", "queues", "GET queues"),
    _look(
        "list the live workers, and what those that answer tell of themselves",
        "workers",
        "GET workers",
    ),
    _look("ask a worker what it does", "control stats", "GET worker"),
    _look("list tasks, the newest first", "tasks", "GET tasks"),
    _look("show all that is known of a task; the start of a UUID is enough", "show", "GET task"),
    _look("say what holds a task that has not ended, and what to type", "why", "GET why"),
    _look("print the result of a task that was sent", "result"),
    _look("count failures by task and type of error", route="GET errors"),
    _look(
        "count the tasks that a change by filter would find, step by step",
        route="POST tasks/count",
    ),
    _look("list workflows whose tasks have changed of late", route="GET workflows"),
    _look("show the steps of a workflow; cancel, retry", "flow", "GET workflow"),
    _look(
        "show queues, workers, rates, running and failing tasks; redraws until q is pressed", "top"
    ),
    _look("print the events of all processes that send theirs, as they come", "events"),
    _look("list limits of tasks, and what runs and waits by them", "limits", "GET limits"),
    _look("list schedules with their last and next runs", "periodic", "GET schedules"),
    _look("list messages that no worker could run", "dead", "GET dead"),
    _look("show one dead letter with its message", "dead show"),
    _look("list every setting and its origin", "config"),
    _look("check stores, settings, clocks, versions and queues", "doctor"),
    _look("tell whether a worker runs here, for probes; does not import the app", "health"),
    _look("print a script that completes commands and options: bash, zsh or fish", "completion"),
    _act("send a task; arguments are JSON, or else strings", "send"),
    _act("send failed tasks again", "retry", "POST tasks/retry"),
    _act("never start these tasks; ask those that run to stop", "revoke", "POST tasks/revoke"),
    _act(
        "give a task a signal, for which it waits or will wait; the value is JSON",
        "signal",
        "POST tasks/signal",
    ),
    _act("forget the states of finished tasks", route="POST tasks/delete"),
    _act("cancel a workflow: no more of it starts", "flow cancel", "POST workflows/cancel"),
    _act(
        "send the failed tasks of a workflow again, and go on from there",
        "flow retry",
        "POST workflows/retry",
    ),
    _act(
        "take nothing from these queues until they are resumed; running tasks go on",
        "pause",
        "POST queues/pause",
    ),
    _act("take from these queues again", "resume", "POST queues/resume"),
    _act("delete what waits in a queue, delayed tasks too", "purge", "POST queues/purge"),
    _act("ask workers what they do, or change them while they run", "control"),
    _act("let a worker end in order", "control shutdown", "POST workers/shutdown"),
    _act(
        "let a worker run so many tasks at a time",
        "control set-concurrency",
        "POST workers/concurrency",
    ),
    _act("create what queues need on the server, when an application is deployed", "declare"),
    _act("delete what is kept of queues that are over: their names and counters", "forget"),
    _act("make the tables of the app's PostgreSQL, or bring them up to date", "migrate"),
    _act("change limits for all workers, until they are reset", "limits set", "POST limits/change"),
    _act("let the limits of the code count again", "limits reset", "POST limits/reset"),
    _act("put dead letters back into their queues", "dead replay", "POST dead/replay"),
    _act("delete dead letters", "dead delete", "POST dead/delete"),
    _act(
        "stop sending until it is resumed, also after a restart",
        "periodic pause",
        "POST schedules/pause",
    ),
    _act("send again, from now on", "periodic resume", "POST schedules/resume"),
    _act("send it once, now; its times stay", "periodic run", "POST schedules/run"),
    _act("change a schedule, until the code that declares it changes", "periodic change"),
    _act("forget a schedule that no code declares any more", "periodic remove"),
)

BY_COMMAND: Mapping[str, Operation] = {one.command: one for one in OPERATIONS if one.command}
BY_ROUTE: Mapping[str, Operation] = {one.route: one for one in OPERATIONS if one.route}
