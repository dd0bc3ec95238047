"""Warnings about settings of a Redis that can lose accepted messages or results. Pure.

`INFO` tells its version, role, eviction and persistence; `CONFIG GET` when snapshots are made and
how soon the append-only file reaches the disk. Managed servers and ACLs may forbid either of them:
what cannot be known is reported as unknown, and is not taken for good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from machinery_py.connections.durability import Concern

Facts = Mapping[str, str]

ASKED = ("save", "appendfsync")  # of CONFIG GET; the rest is in INFO


def read_info(text: str) -> dict[str, str]:
    """Read the lines of INFO."""
    pairs = (line.partition(":") for line in text.splitlines() if not line.startswith("#"))
    return {name: value.strip() for name, colon, value in pairs if colon}


def read_config(reply: Sequence[bytes]) -> dict[str, str]:
    """Read the reply of CONFIG GET."""
    words = [word.decode(errors="replace") for word in reply]
    return dict(zip(words[::2], words[1::2], strict=False))


def version_of(info: Facts) -> tuple[int, int] | None:
    """Return major and minor number, if it tells."""
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
        text = "it does not tell whether it keeps what it stores (give this user the right +info)"
        return [Concern(text, is_certain=False)]
    found = (_role(info), _eviction(info), _persistence(info, config))
    return [one for one in found if one is not None]


def _role(info: Facts) -> Concern | None:
    if info.get("role") != "slave":
        return None
    master = f"{info.get('master_host', '?')}:{info.get('master_port', '?')}"
    hint = "(name the master in the URL, or its sentinels and master_name)"
    if info.get("slave_read_only") == "0":
        return Concern(
            f"it is a replica of {master} that takes writes, and forgets them when it is "
            f"synchronised again {hint}"
        )
    return Concern(
        f"it is a read-only replica of {master}: no task can be stored or taken here {hint}"
    )


def _eviction(info: Facts) -> Concern | None:
    policy = info.get("maxmemory_policy")
    if policy is None:
        text = (
            "it does not tell its maxmemory-policy "
            "(expected noeviction: any other throws tasks away)"
        )
        return Concern(text, is_certain=False)
    if policy == "noeviction":
        return None
    when = "maxmemory is ever set and used up"
    if (limit := info.get("maxmemory", "0")) != "0":
        when = f"its {info.get('maxmemory_human', limit)} of memory are used up"
    what = "states, results" if policy.startswith("volatile") else "tasks, states"
    return Concern(
        f"maxmemory-policy is {policy}: {what} and locks are thrown away when {when} "
        "(set maxmemory-policy noeviction)"
    )


def _persistence(info: Facts, config: Facts | None) -> Concern | None:
    enabled = info.get("aof_enabled")
    if enabled is None:
        text = "it does not tell whether it has an append-only file (expected appendonly yes)"
        return Concern(text, is_certain=False)
    if enabled == "1":
        if config is None or config.get("appendfsync") != "no":
            return None
        return Concern(
            "appendfsync is no: a power cut loses what came in the last half minute "
            "(set appendfsync everysec, or always)"
        )
    if config is None or "save" not in config:
        lost = (
            "a restart loses what came since its last snapshot, or everything "
            "(whether it makes any, it does not tell)"
        )
    elif config["save"].strip():
        lost = f"a restart loses what came since its last snapshot (save {config['save']})"
    else:
        lost = "it makes no snapshots either, and a restart loses everything"
    return Concern(f"it has no append-only file: {lost} (set appendonly yes)")
