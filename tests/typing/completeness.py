"""Whether the types of all public symbols are written down: `make types` runs it.

    python -m tests.typing.completeness

pyright looks at every module, and calls a symbol complete if no part of its type is inferred. Left
out: the loggers of our modules, and what stands on classes of Django, which publishes no types.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent.parent
FOLLOWS = ("partially unknown", "No docstring")  # from another symbol; or of no type


def incomplete() -> list[str]:
    """Return a text for each symbol whose type is not written down."""
    programs = pathlib.Path(sys.executable).parent
    # `--pythonpath` does not count here, and an editable install is not found.
    env = {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    command = [str(programs / "pyright"), "--verifytypes", "machinery_py", "--ignoreexternal"]
    done = subprocess.run(
        [*command, "--outputjson"], cwd=ROOT, env=env, check=False, capture_output=True, text=True
    )
    symbols: list[dict[str, Any]] = json.loads(done.stdout)["typeCompleteness"]["symbols"]
    if not symbols:
        raise RuntimeError(f"pyright found no symbols:\n{done.stdout}{done.stderr}")
    return [
        f"{symbol['name']}: {one['message']}"
        for symbol in symbols
        if not symbol["isTypeKnown"] and not _is_left_out(symbol["name"])
        for one in symbol["diagnostics"]
        if not any(words in one["message"] for words in FOLLOWS)
    ]


def _is_left_out(name: str) -> bool:
    return name.endswith(".logger") or name.startswith("machinery_py.contrib.django.")


if __name__ == "__main__":
    sys.exit("\n".join(incomplete()) or 0)
