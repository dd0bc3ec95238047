"""Recorded lines of the real Go program; golden/ copies /golden of the project's reference."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "golden"


def lines(name: str) -> list[dict[str, Any]]:
    with (FOLDER / name).open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def line_id(line: dict[str, Any]) -> str:
    kind = line.get("category", line.get("kind"))
    text = line.get("name") or f"{kind} {line.get('type', '')} {line.get('value', '')}"
    return re.sub(r"[^ -~]", "?", text)[:80]


def payload(line: dict[str, Any]) -> bytes:
    if "payload_base64" in line:
        return base64.b64decode(line["payload_base64"])
    text: str = line["payload"]
    return text.encode()
