"""What is said without the library that an extra brings."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "library", "extra"),
    [
        ("contrib.opentelemetry", "opentelemetry", "otel"),
        ("contrib.sentry", "sentry_sdk", "sentry"),
        ("contrib.django", "django", "django"),
        ("contrib.flask", "flask", "flask"),
        ("contrib.sqlalchemy", "sqlalchemy", "sqlalchemy"),
        ("stores.postgresql", "psycopg", "postgres"),
    ],
)
def test_missing_library_is_named_with_its_extra(module: str, library: str, extra: str) -> None:
    program = f"import sys; sys.modules[{library!r}] = None; import machinery_py.{module}"

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )

    assert done.stderr.splitlines()[-1].endswith(f"pip install 'machinery_py[{extra}]'")
