"""How a task can end, and what follows under each setting: the table of docs/reference/endings.md.

`test_endings.py` plays each row over real stores. The numbers are those of the checklist of what
other task queues do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from machinery_py.registry.options import TaskOptions
from machinery_py.registry.outcomes import NOT_ITS_FAILURE
from machinery_py.tasks.states import State

OK, FAILED = State.SUCCESS, State.FAILURE
STRIKES = 2  # of the workers that play; each is a process that has to start
OURS = "machinery_py.errors."

#: Settings of the tasks that play the rows.
SETTINGS: dict[str, TaskOptions] = {
    "late": {},
    "early": {"ack": "early"},
    "fail": {"on_worker_lost": "fail"},
    "letter": {"on_failure": "dead_letter"},
}


@dataclass(frozen=True)
class Ending:
    """One way to end.

    Attributes:
        numbers: of the checklist.
        play: what the task does, see ending_app.py; or what the test does.
        text: the row's head.
        shown: what follows by default.
        cut_off: the run is cut off with its worker, so that `ack` and `on_worker_lost` decide.
        letter: reason of its dead letter under each setting.
        options: of the call.
    """

    numbers: str
    play: str
    text: str
    shown: str
    state: State = OK
    error_type: str = ""
    calls: int = 1
    cut_off: bool = False
    letter: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)

    def state_with(self, setting: str) -> tuple[State, str, int]:
        """The final state, its error's type, and how often the function was called."""
        if self.cut_off and setting in ("early", "fail"):
            return FAILED, "WorkerLost", 1
        return self.state, self.error_type, self.calls

    def letter_with(self, setting: str) -> str:
        """The reason of the dead letter, or ""."""
        state, error_type, _ = self.state_with(setting)
        if self.letter and error_type == self.error_type:
            return self.letter
        wanted = setting == "letter" and state is FAILED
        return "failed" if wanted and error_type not in NOT_ITS_FAILURE else ""


ENDINGS = (
    Ending("F61-F70", "return", "it returns", "SUCCESS"),
    Ending(
        "F44",
        "raise once",
        "it raises, and tries are left",
        "RETRY, then the next try",
        calls=2,
        options={"retries": 1},
    ),
    Ending(
        "F33",
        "raise",
        "it raises in its last try",
        "FAILURE with that error",
        FAILED,
        "ValueError",
        2,
        options={"retries": 1},
    ),
    Ending(
        "F47",
        "give up",
        "it raises `NoRetry`, or an error of `dont_retry_on`",
        "FAILURE with that error",
        FAILED,
        f"{OURS}NoRetry",
        options={"retries": 3},
    ),
    Ending(
        "F32-F42-F43",
        "retry",
        "it raises `Retry`, and tries are left",
        "RETRY, then the next try",
        calls=2,
        options={"retries": 1},
    ),
    Ending(
        "F35",
        "retry eta",
        "`Retry(eta=…)`",
        "RETRY, then the next try at that moment",
        calls=2,
        options={"retries": 1},
    ),
    Ending(
        "F38",
        "retry args",
        "`Retry(args=…)`",
        "RETRY, then the next try with these arguments",
        calls=2,
        options={"retries": 1},
    ),
    Ending(
        "F37",
        "retry retries",
        "`Retry(retries=1)`, again and again",
        "RETRY, then FAILURE after the second try",
        FAILED,
        f"{OURS}Retry",
        2,
        options={"retries": 9},
    ),
    Ending(
        "F39",
        "retry cause",
        "`raise Retry(…) from error` in its last try",
        "FAILURE with the error that it was raised from",
        FAILED,
        "ValueError",
        options={"retries": 0},
    ),
    Ending(
        "X04",
        "later",
        "it raises `RetryTaskLater`",
        "RETRY, then again; no try is used up",
        calls=2,
    ),
    Ending(
        "X04",
        "later limit",
        "`RetryTaskLater(limit=1)`, again and again",
        "RETRY, then FAILURE",
        FAILED,
        f"{OURS}RetryTaskLater",
        2,
    ),
    Ending(
        "F91",
        "reject",
        "it raises `Reject`",
        "FAILURE, `Rejected`",
        FAILED,
        "Rejected",
        letter="rejected",
        options={"retries": 3},
    ),
    Ending(
        "F91",
        "put back",
        "it raises `Reject(requeue=True)`",
        "RETRY, then again; no try is used up",
        calls=2,
    ),
    Ending(
        "F47-F91",
        "disregard",
        "it raises `Ignore`",
        "FAILURE, `Ignored`",
        FAILED,
        "Ignored",
        options={"retries": 3},
    ),
    Ending(
        "F67",
        "wait",
        "it runs past its `time_limit`",
        "as if it had raised `TimeLimitExceeded`",
        FAILED,
        f"{OURS}TimeLimitExceeded",
        options={"time_limit": 1.0},
    ),
    Ending(
        "F67",
        "ignore",
        'it runs past its `time_limit` and `kill_after`, with `pool="process"`',
        "its process is killed; as if it had raised `TimeLimitExceeded`",
        FAILED,
        f"{OURS}TimeLimitExceeded",
        options={"time_limit": 1.0, "kill_after": 0.2},
    ),
    Ending(
        "F64-F65-F69-F87",
        "die once",
        "its worker or its process is lost while it runs",
        "it runs again, with a strike; no try is used up",
        calls=2,
        cut_off=True,
    ),
    Ending(
        "F64-F65",
        "die",
        "its worker or its process is lost each time",
        "FAILURE after `max_strikes` strikes (3 by default)",
        FAILED,
        "Poison",
        STRIKES,
        cut_off=True,
        letter="poison",
    ),
    Ending(
        "F66",
        "stop",
        "its worker is stopped, and it does not end within `shutdown_timeout`",
        "it runs again; no try is used up",
        calls=2,
        cut_off=True,
    ),
    Ending(
        "", "revoke", "it is revoked before it runs", 'FAILURE, "revoked"', FAILED, "Revoked", 0
    ),
    Ending(
        "",
        "terminate",
        'it is revoked with `terminate=True` while it runs, with `pool="process"`',
        'its process is killed; FAILURE, "revoked"',
        FAILED,
        "Revoked",
    ),
    Ending(
        "",
        "expire",
        "it expires before it runs",
        'FAILURE, "expired before it was started"',
        FAILED,
        "Expired",
        0,
        options={"expires": -1.0},
    ),
    Ending(
        "",
        "misfit",
        "its arguments do not fit",
        "FAILURE",
        FAILED,
        "ArgumentError",
        0,
        options={"retries": 3},
    ),
    Ending(
        "",
        "unknown",
        "no worker knows it within `unregistered_timeout`",
        "FAILURE",
        FAILED,
        "TaskNotRegistered",
        0,
        letter="unregistered",
    ),
)


#: Rows that a setting answers; the names of the tests have them.
NUMBERS = {"letter": "F68-M68 letter", "early": "F64 early", "late": "F65 late"}
#: Tests that hold the other rows of the checklist.
TESTS = {
    "F36": "test_retry_may_change_queue_arguments_and_moment",
    "F40": "test_a_retry_that_is_refused_is_a_failure",
    "F41": "test_eager_runs_inside_send",
    "F45": "test_a_module_that_is_loaded_twice_registers_its_tasks_twice",
    "F49": "test_exponential_backoff_has_a_factor_and_a_cap",
    "F50": "test_exponential_backoff_has_a_factor_and_a_cap",
    "F51": "test_jitter_scatters_evenly",
    "F52": "test_retry_counts_as_a_try_and_may_set_the_number",
    "F53": "test_a_task_can_still_be_called",
    "F54": "test_tasks_behind_a_blocked_one_are_run_by_another_worker",
    "F56": "test_tasks_behind_a_blocked_one_are_run_by_another_worker",
    "F57": "test_closing_returns_deliveries_at_once_without_a_strike",
    "F59": "test_long_messages_are_claimed_a_few_megabytes_at_a_time",
    "F60": "test_tasks_behind_a_blocked_one_are_run_by_another_worker",
    "F62": "test_the_tasks_of_a_killed_worker_run_again_at_once",
    "F63": "test_task_that_holds_the_interpreter_runs_once",
    "F71": "test_closing_returns_deliveries_at_once_without_a_strike",
    "F72": "test_how_tasks_end_is_told",
    "F86": "test_one_of_many_threads_settles",
    "F88": "test_ack_is_late_by_default",
    "F89": "test_options_of_the_task_win_over_include_and_that_over_the_set",
}
#: Rows that are answered otherwise, and how.
OTHERWISE = {
    "F34": "A retry inside a task is raised (`Retry`), so no line behind it runs. A task that "
    "is to go on sends a call of its own.",
    "F46": "A task is a function, or an object that can be called, under a name (`register_task`); "
    "there are no task classes.",
    "F48": "`retries` and `backoff` are options of the task, for errors and for `Retry` alike.",
    "F55": "`prefetch=0` claims for free slots alone. No claim is without a limit.",
    "F58": "That a prefetch pays is measured (`python -m benchmarks`), and not tested.",
    "F85": "A running task is STARTED, with its worker and the moment, whether `ack` is early or "
    "late. The process of a task is not shown.",
}
#: All of them: "F32" to "F72", "F85" to "F89", and three more.
CHECKLIST = {f"F{n}" for n in (*range(32, 73), *range(85, 90))} | {"F91", "X04", "M68"}


def answered() -> set[str]:
    """Return the numbers that have a test or an answer."""
    played = {number for one in ENDINGS for number in one.numbers.split("-")} - {""}
    played |= {number for text in NUMBERS.values() for number in re.findall(r"[FMX]\d\d", text)}
    return played | set(TESTS) | set(OTHERWISE)


def differing() -> list[tuple[Ending, str]]:
    """Return the rows, each by default and with the settings that change what follows."""
    return [
        (one, setting)
        for one in ENDINGS
        for setting in SETTINGS
        # Where the first loss is the end, "die" is as "die once".
        if (one.play, setting) not in (("die", "early"), ("die", "fail"))
        if setting == "late"
        or one.play == "return"
        or one.state_with(setting) != one.state_with("late")
        or one.letter_with(setting) != one.letter_with("late")
    ]


def otherwise() -> str:
    """Return the list of the page."""
    return "\n".join(f"- {text}" for text in OTHERWISE.values())


def table() -> str:
    """Return the table of the page."""
    settings = ('`ack="early"`', '`on_worker_lost="fail"`')
    heads = ["the task's end", "by default", *settings, "dead letter"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for one in ENDINGS:
        other = "FAILURE, `WorkerLost`" if one.cut_off else "the same"
        letter = one.letter_with("letter")
        shown = f"`{letter}`" if letter else "–"
        if letter == "failed":
            shown = '`failed`, with `on_failure="dead_letter"`'
        lines.append(f"| {one.text} | {one.shown} | {other} | {other} | {shown} |")
    return "\n".join(lines)
