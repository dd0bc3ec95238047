"""What becomes of PostgreSQL's errors."""

from __future__ import annotations

import psycopg
import pytest
from psycopg.pq import DiagnosticField

from machinery_py.connections.postgresql.errors import translate
from machinery_py.errors import BrokerUnavailable, MachineryError, PublishRefused


@pytest.mark.parametrize(
    ("source", "expected", "permanent"),
    [("nbtutils.c", PublishRefused, True), ("async.c", BrokerUnavailable, False)],
)
def test_full_queue_of_notifications_passes_and_a_big_value_does_not(
    source: str, expected: type[MachineryError], permanent: bool
) -> None:
    """Both are 54000. The queue has 8 GB: filling it is no test."""
    found = psycopg.errors.ProgramLimitExceeded(
        "too much", info={DiagnosticField.SOURCE_FILE: source.encode()}
    )

    error = translate(found, "postgresql://db/shop", doing="writing", away=BrokerUnavailable)

    assert type(error) is expected
    assert error.permanent is permanent
