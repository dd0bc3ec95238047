"""The rule for names: what is refused, and that all of Go's are taken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machinery_py import names
from machinery_py.errors import ConfigError, MachineryError, NameRefused, PublishRefused
from machinery_py.queues import QueueOrder, problem_of
from machinery_py.tasks.signature import new_uuid


def check_all(name: str) -> None:
    names.check_task(name)
    names.check_lock(name)
    names.check_queue(name)
    names.check_uuid(name)


@pytest.mark.parametrize(
    "name", ["", "\0", "a\nb", "a\x7f", "\x9f", "\ud800", "x" * 256, "ü" * 128]
)
def test_a_name_that_is_empty_long_or_unsafe_is_refused_for_all(name: str) -> None:
    for check in (names.check_task, names.check_lock, names.check_queue, names.check_uuid):
        with pytest.raises(NameRefused):
            check(name)


@pytest.mark.parametrize(
    "name",
    ["delayed_tasks", "TriggerChordMutex", "machinery_lock_app@every 3s", "mpy:", "mpy:m:{x}"],
)
def test_shared_key_is_no_queue_and_no_uuid(name: str) -> None:
    names.check_task(name)
    names.check_lock(name)
    for check in (names.check_queue, names.check_uuid):
        with pytest.raises(NameRefused, match="reserved"):
            check(name)


@pytest.mark.parametrize(
    "name",
    [
        "amq.",
        "amq.gen-1",
        "machinery.workers",
        "machinery.dead.mail",
        "machinery.paused.quorum",
        "machinery.held.w.0",
        "task_1a2b3c4d-0000-4000-8000-1a2b3c4d5e6f",
    ],
)
def test_reserved_queue_names_are_refused_but_legal_as_uuids(name: str) -> None:
    names.check_uuid(name)
    with pytest.raises(NameRefused, match="reserved"):
        names.check_queue(name)


@pytest.mark.parametrize(
    "name",
    [
        "machinery.mail",
        "machineryx",
        "amqp",
        "delayed_tasks_2",
        "Delayed_tasks",
        "mail:high:",
        "a b",
        "{q}",
        "x" * 255,
        "ü" * 127,
        "task_mail",
        "group_1",
        "machinery",
        "null",
        "*",
        "日本",
    ],
)
def test_odd_names_are_names(name: str) -> None:
    check_all(name)


@pytest.mark.parametrize("prefix", ["task_", "group_", "chord_", ""])
def test_uuids_as_go_makes_them_are_uuids(prefix: str) -> None:
    names.check_uuid(new_uuid(prefix), "machinery_tasks")


def test_a_uuid_is_not_the_name_of_its_queue_or_group() -> None:
    names.check_message("mail", "machinery_tasks", name="add", uuid="order-1", group_uuid="group-1")
    for uuid, group in (
        ("mail", ""),
        ("jobs", ""),
        ("order-1", "order-1"),
        ("order-1", "mail"),
        ("machinery_tasks", ""),
    ):
        with pytest.raises(NameRefused):
            names.check_message("mail", "jobs", name="add", uuid=uuid, group_uuid=group)


def test_a_refusal_names_the_thing_shortly_and_is_for_good() -> None:
    with pytest.raises(NameRefused) as caught:
        names.check_queue("x" * 3_000_000)
    assert str(caught.value) == (
        f"queue '{'x' * 54}… (3,000,000 characters)' has 3,000,000 bytes (at most 255)"
    )
    assert isinstance(caught.value, MachineryError) and isinstance(caught.value, PublishRefused)
    assert isinstance(caught.value, ValueError) and caught.value.permanent


def test_queues_of_a_worker_or_a_setting_are_checked() -> None:
    with pytest.raises(ConfigError, match="delayed_tasks"):
        QueueOrder.of(["mail", "delayed_tasks"])
    assert "delayed_tasks" in problem_of("mail,delayed_tasks:3")


@pytest.mark.slow
@given(st.text(max_size=300))
def test_any_text_is_refused_in_words_or_a_safe_name(text: str) -> None:
    for check in (names.check_task, names.check_queue, names.check_uuid):
        try:
            check(text)
        except NameRefused as error:
            assert error.name == text and len(str(error)) < 500
        else:
            assert 0 < len(text.encode()) <= 255 and text.isprintable() | (
                not set(text) & set(map(chr, range(32)))
            )
