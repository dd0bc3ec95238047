"""Whether a Redis keeps what it was told: its version, persistence, eviction and role, from what it says of itself. Pure.

`INFO` tells most of it; `CONFIG GET` when snapshots are made and how soon the append-only file reaches the disk. Managed
servers and ACLs forbid either of them: what cannot be known is said to be unknown, and is not taken for good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from machinery_py.connections.durability import Concern

Facts = Mapping[str, str]

ASKED = ("save", "appendfsync")  # of CONFIG GET; the rest is in INFO


def read_info(text: str) -> dict[str, str]:
    """The lines of INFO."""
    pairs = (line.partition(":") for line in text.splitlines() if not line.startswith("#"))
    return {name: value.strip() for name, colon, value in pairs if colon}


def read_config(reply: Sequence[bytes]) -> dict[str, str]:
    """The reply of CONFIG GET."""
    words = [word.decode(errors="replace") for word in reply]
    return dict(zip(words[::2], words[1::2], strict=False))


def version_of(info: Facts) -> tuple[int, int] | None:
    """Major and minor number, if it tells."""
    major, _, rest = info.get("redis_version", "").partition(".")
    minor = rest.partition(".")[0]
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None


def concerns(info: Facts, config: Facts | None) -> list[Concern]:
    """Return what is wrong or unknown, the worst first.

    Args:
        info: empty if the server does not tell.
        config: None if the server does not tell.
    """
    if not info:
        return [
            Concern(
                "it does not tell whether it keeps what it stores (give this user the right +info)",
                is_certain=False,
            )
        ]
    return [*_role(info), *_eviction(info), *_persistence(info, config)]


def _role(info: Facts) -> list[Concern]:
    if info.get("role") != "slave":
        return []
    master = f"{info.get('master_host', '?')}:{info.get('master_port', '?')}"
    if info.get("slave_read_only") == "0":
        return [
            Concern(
                f"it is a replica of {master} that takes writes, and forgets them when it is synchronised again "
                "(name the master in the URL, or its sentinels and master_name)"
            )
        ]
    return [
        Concern(
            f"it is a read-only replica of {master}: no task can be stored or taken here "
            "(name the master in the URL, or its sentinels and master_name)"
        )
    ]


def _eviction(info: Facts) -> list[Concern]:
    policy = info.get("maxmemory_policy")
    if policy is None:
        text = "it does not tell its maxmemory-policy (expected noeviction: any other throws tasks away)"
        return [Concern(text, is_certain=False)]
    if policy == "noeviction":
        return []
    limit = info.get("maxmemory", "0")
    size = info.get("maxmemory_human", limit)
    when = (
        f"its {size} of memory are used up" if limit != "0" else "maxmemory is ever set and used up"
    )
    what = (
        "states, results and locks" if policy.startswith("volatile") else "tasks, states and locks"
    )
    return [
        Concern(
            f"maxmemory-policy is {policy}: {what} are thrown away when {when} (set maxmemory-policy noeviction)"
        )
    ]


def _persistence(info: Facts, config: Facts | None) -> list[Concern]:
    enabled = info.get("aof_enabled")
    if enabled is None:
        return [
            Concern(
                "it does not tell whether it has an append-only file (expected appendonly yes)",
                is_certain=False,
            )
        ]
    if enabled == "1":
        if config is not None and config.get("appendfsync") == "no":
            return [
                Concern(
                    "appendfsync is no: a power cut loses what came in the last half minute "
                    "(set appendfsync everysec, or always)"
                )
            ]
        return []
    if config is None or "save" not in config:
        lost = "a restart loses what came since its last snapshot, or everything (whether it makes any, it does not tell)"
    elif config["save"].strip():
        lost = f"a restart loses what came since its last snapshot (save {config['save']})"
    else:
        lost = "it makes no snapshots either, and a restart loses everything"
    return [Concern(f"it has no append-only file: {lost} (set appendonly yes)")]
