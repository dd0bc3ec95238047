"""Frames: whole records, deadlines, and the end of a pipe."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from machinery_py.registry.outcomes import Failed, Lost, Outcome, Postponed, Retried, Succeeded
from machinery_py.tasks.signature import Arg
from machinery_py.worker.processes.frames import (
    Done,
    FrameReader,
    FrameWriter,
    PipeEnd,
    Progress,
    Ready,
    Reply,
)

Pipe = tuple[FrameReader[Reply], FrameWriter]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    read, write = os.pipe()
    reader: FrameReader[Reply] = FrameReader(read, Reply)
    writer = FrameWriter(write)
    yield reader, writer
    reader.close()
    writer.close()


@pytest.mark.parametrize(
    "outcome",
    [
        Succeeded((Arg(type="[]byte", value=b"\xff"), Arg(type="float64", value=0.5))),
        Failed(error="no", error_type="ValueError", traceback="…", retryable=False),
        Postponed(error="later", delay=1.5, limit=3),
        Retried(failed=Failed(error="no"), args=(Arg(type="int64", value=2**63 - 1),)),
        Lost(error="gone"),
    ],
)
def test_every_outcome_arrives_as_it_was(pipe: Pipe, outcome: Outcome) -> None:
    reader, writer = pipe

    writer.write(Done(7, outcome))

    reply = reader.read()
    assert isinstance(reply, Done)
    assert str(reply.outcome).replace("[", "(").replace("]", ")") == str(outcome).replace(
        "[", "("
    ).replace("]", ")").replace(",)", ")")


def test_records_larger_than_the_pipe_pass(pipe: Pipe) -> None:
    reader, writer = pipe
    large = Done(1, Failed(error="", traceback="x" * 1_000_000))
    thread = threading.Thread(target=lambda: (writer.write(large), writer.write(Ready())))
    thread.start()

    assert reader.read() == large
    assert reader.read() == Ready()
    thread.join()


def test_nothing_in_time_is_none(pipe: Pipe) -> None:
    reader, writer = pipe
    assert reader.read(time.monotonic() + 0.01) is None

    writer.write(Progress(1, (1.0, 2.0), {}))

    assert reader.read(time.monotonic() + 0.01) == Progress(1, (1.0, 2.0), {})


def test_pipe_that_nobody_reads_is_full_in_the_end(pipe: Pipe) -> None:
    _, writer = pipe

    assert not writer.write(Failed(error="", traceback="x" * 1_000_000), time.monotonic() + 0.01)


@pytest.mark.parametrize(
    "sent", [b"", b"\x00\x00", b"\x00\x00\x00\x09half", b"\x00\x00\x00\x01\xc1"]
)
def test_what_is_no_whole_frame_is_the_end(sent: bytes) -> None:
    read, write = os.pipe()
    reader: FrameReader[Reply] = FrameReader(read, Reply)
    os.write(write, sent)
    os.close(write)

    with pytest.raises(PipeEnd):
        reader.read()
    reader.close()


def test_writing_to_nobody_is_the_end() -> None:
    read, write = os.pipe()
    writer = FrameWriter(write)
    os.close(read)

    with pytest.raises(PipeEnd):
        writer.write(Ready())
    writer.close()
