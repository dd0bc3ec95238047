"""What the headers of a call may say about it, whoever wrote them."""

from __future__ import annotations

import datetime as dt

import pytest

from machinery_py import Server
from machinery_py.registry.options import TaskSettings, settings_of_call


@pytest.mark.parametrize("text", ["0", "-0.0", "-1", "nan", "inf", "1e400", "x", None, [1]])
def test_time_limit_that_no_sender_of_ours_has_written_counts_as_not_given(text: object) -> None:
    settings = settings_of_call(TaskSettings(time_limit=5.0), {"machinery_time_limit": text})
    assert settings.time_limit == 5.0


@pytest.mark.parametrize("limit", [30, 30.0, dt.timedelta(seconds=30)])
def test_options_of_a_call_come_back_from_its_headers(limit: float | dt.timedelta) -> None:
    task = Server("memory://").task(time_limit=5.0)(print)
    own = task.options(time_limit=limit, kill_after=0).options(ignore_result=True, time_limit=limit)

    settings = settings_of_call(task.settings, own.signature().headers)
    assert (settings.time_limit, settings.kill_after, settings.ignore_result) == (30.0, 0.0, True)
    unlimited = task.options(time_limit=None).signature().headers
    assert settings_of_call(task.settings, unlimited).time_limit is None


def test_exclusive_options_of_a_call_come_back_from_its_headers() -> None:
    task = Server("memory://").task(exclusive="wait", exclusive_key="a", exclusive_timeout=9)(print)
    own = task.options(exclusive="skip", exclusive_key="b"), task.options(exclusive_timeout=None)

    found = [settings_of_call(task.settings, one.signature().headers) for one in own]
    assert [(one.exclusive, one.exclusive_key, one.exclusive_timeout) for one in found] == [
        ("skip", "b", 9),
        ("wait", "a", None),
    ]


@pytest.mark.parametrize("word", ["maybe", "", None, 5, ["wait"]])
def test_exclusive_that_no_sender_of_ours_has_written_counts_as_not_given(word: object) -> None:
    headers = {"machinery_exclusive": word, "machinery_exclusive_key": [1]}
    settings = settings_of_call(TaskSettings(exclusive="skip"), headers)
    assert (settings.exclusive, settings.exclusive_key) == ("skip", "")


@pytest.mark.parametrize("text", ["0", "true", "1e300", "nan", "x"])
def test_expiry_that_no_sender_of_ours_has_written_counts_as_not_given(text: str) -> None:
    settings = settings_of_call(
        TaskSettings(result_expires=5.0), {"machinery_result_expires": text}
    )
    assert settings.result_expires == 5.0


def test_ack_is_late_by_default() -> None:
    settings = Server("memory://").task(print).settings
    assert (settings.ack, settings.on_worker_lost, settings.on_failure) == ("late", "retry", "ack")
