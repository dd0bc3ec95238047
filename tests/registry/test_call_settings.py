"""What the headers of a call may say about it, whoever wrote them."""

from __future__ import annotations

import pytest

from machinery_py.registry.options import TaskSettings, settings_of_call


@pytest.mark.parametrize("text", ["0", "-0.0", "-1", "nan", "inf", "1e400", "x", None, [1]])
def test_time_limit_that_no_sender_of_ours_has_written_counts_as_not_given(text: object) -> None:
    settings = settings_of_call(TaskSettings(time_limit=5.0), {"machinery_time_limit": text})
    assert settings.time_limit == 5.0
