"""Limits of tasks and limiters: looked at, and changed, for all processes at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from machinery_py.app import Application
from machinery_py.clock import Seconds
from machinery_py.errors import ArgumentError, nearest
from machinery_py.limits.base import Rule, ScopeReport, UsageReport, stored_name
from machinery_py.limits.limiter import Limiter
from machinery_py.limits.settings import (
    LIMIT_OPTIONS,
    check_limits,
    named_by,
    options_of,
    rules_of,
    scope_of,
)
from machinery_py.registry.unique_keys import owner
from machinery_py.texts import length

LIMITER = "limiter:"  # in front of the name of a limiter


class LimitReport(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a task or a limiter.

    Attributes:
        name: of the task, or `limiter:NAME`.
        options: of the code, as far as this process knows it: `{"rate": "5/s"}`.
        changed: what was set since, and wins over them.
        usage: what is counted under each key, those who were asked for last.
    """

    name: str
    options: Mapping[str, Any]
    changed: Mapping[str, Any]
    usage: Sequence[UsageReport] = ()


class LimitRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of a table of limits: one that is set, or one that is in use under a key.

    Attributes:
        limit: as in "rate=5/s"; option: its first word, "exclusive" for the line of such a task.
        changed: whether it was set at run time.
        in_use: whether the numbers mean anything.
        running: None for a rate, which counts none.
        wait: seconds until a newcomer's turn.
    """

    name: str
    limit: str
    option: str
    changed: bool = False
    in_use: bool = False
    key: str = ""
    running: int | None = None
    waiting: int = 0
    wait: float = 0.0


def limit_rows(reports: Iterable[LimitReport]) -> list[LimitRow]:
    """Return what the reports say, as a table."""
    rows: list[LimitRow] = []
    for one in reports:
        for option, value in {**one.options, **one.changed}.items():
            text, changed = _text({option: value}), option in one.changed
            rows.append(LimitRow(name=one.name, limit=text, option=option, changed=changed))
        for used in one.usage:
            rule = Rule(name=used.name, limit=used.limit, interval=used.interval)
            rows.append(
                LimitRow(
                    name=one.name,
                    limit=rule_text(rule),
                    option=next(iter(options_of([rule])), used.name),
                    in_use=True,
                    key=used.key,
                    running=None if used.interval else used.running,
                    waiting=used.waiting,
                    wait=used.wait,
                )
            )
    return rows


def rule_text(rule: Rule) -> str:
    """Return a rule as it is written in the code: `rate=5/s`."""
    return _text(options_of([rule])) or rule.name


def _text(options: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{option}={length(value) if option == 'min_interval' else value}"
        for option, value in options.items()
    )


def limit_reports(app: Application) -> list[LimitReport]:
    """Return what is limited, known or in use, sorted by name."""
    whose = owner(app.config)
    known = {task.name: options_of(task.own_rules) for task in app.registry if task.own_rules}
    scopes = {stored_name(scope_of(task.name, owner=whose)): task.name for task in app.registry}
    found: dict[str, ScopeReport] = {}
    for one in app.stores.limits.read():
        name = scopes.get(one.scope) or named_by(one.scope, owner=whose)
        if name is not None:
            found[name] = one
    return [
        LimitReport(
            name=name,
            options={**known.get(name, {})},
            changed={**options_of(found[name].changed)} if name in found else {},
            usage=found[name].usage if name in found else (),
        )
        for name in sorted({*known, *found})
    ]


def change_limit(app: Application, name: str, options: Mapping[str, Any]) -> None:
    """Let these limits win over those of the code; none: those of the code count again.

    Raises:
        ArgumentError: there is no such task or limit, or a value is wrong.
    """
    unknown = options.keys() - LIMIT_OPTIONS
    if unknown:
        known = ", ".join(sorted(LIMIT_OPTIONS))
        raise ArgumentError(f"{name}: no limit {min(unknown)!r} (known: {known})")
    limits, scope = app.stores.limits, scope_of(name, owner=owner(app.config))
    if not options:
        limits.change(scope, ())
        return
    before = next((one for one in limits.read() if one.scope == stored_name(scope)), None)
    coded = _coded(app, name, before)
    given = {option: value for option, value in options.items() if value is not None}
    changed = {**options_of(before.changed)} if before is not None else {}
    if "burst" in given and "rate" not in {**changed, **given}:
        changed |= {option: coded[option] for option in ("rate",) if option in coded}
    try:
        check_limits(name, changed | given)
    except ValueError as error:
        raise ArgumentError(str(error)) from None
    limits.change(scope, rules_of(changed | given))


def _coded(app: Application, name: str, before: ScopeReport | None) -> Mapping[str, Any]:
    """Return the limits of a task in the code, as far as it is known here."""
    task = app.registry.find(name)
    if task is None and before is None and not name.startswith(LIMITER):
        names = app.registry.names()
        raise ArgumentError(
            f"no task {name!r} is known here{nearest(name, names)} "
            f"(tasks: {', '.join(names) or 'none'}; a limiter: {LIMITER}NAME)"
        )
    return {} if task is None else options_of(task.own_rules)


def limiter_of(
    app: Application, name: str, options: Mapping[str, Any], *, key: str, timeout: Seconds | None
) -> Limiter:
    """Return a limiter; see `Server.limiter`.

    Args:
        options: see LimitOptions; rate="" is none.
        key: counts apart from other keys.
        timeout: seconds to wait at most; then LimitNotAcquired.

    Raises:
        ValueError: a limit makes no sense, or there is none.
    """
    name, options = LIMITER + name, {**options, "rate": options.get("rate") or None}
    check_limits(name, options)
    rules = [msgspec.structs.replace(rule, key=key) for rule in rules_of(options)]
    if not rules:
        raise ValueError(f"{name}: found no limit (expected a rate, max_running or min_interval)")
    scope = scope_of(name, owner=owner(app.config))
    outage = app.config.publish_timeout
    return Limiter(app.slots, scope, name, rules, timeout=timeout, outage=outage)
