"""Ranks in other processes: a task and its report survive pickling, and say what a run in this process says."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from harness.engines.engine import RunRequest
from harness.engines.processes.flight_recorder import _COUNT, FlightRecorder, ReadCalls, Recording, anonymous_file
from harness.engines.processes.rank_program import run_rank
from harness.errors import RequestError
from harness.running.ranks.execution import execute
from reference.case import Case
from tests.harness.toy_subjects import LoopEngine

CASE = Case.parse("mode=tp tp=1 layers=1 dtype=float64 metric=true")


class OneProcess(LoopEngine):
    """A remote engine of one rank, which is this process on gloo; everything goes through pickle."""

    name = "one"
    remote = True

    def run_request(self, request: RunRequest, observer: object) -> list[Any]:
        """The result of the one rank; an exception of it is raised."""
        sent, given = pickle.loads(pickle.dumps((request.program, request.args)))
        store = torch._C._distributed_c10d.HashStore()
        ended = run_rank(sent, given, rank=0, world_size=1, store=store, seed=request.seed, timeout_s=10)
        if ended.error is not None:
            raise ended.error
        return [pickle.loads(pickle.dumps(ended.value))]


def test_a_subject_that_cannot_be_sent_is_a_wrong_request() -> None:
    with pytest.raises(RequestError, match="subject .*<lambda>: cannot be sent to .*; legal: name it module:object"):
        execute(CASE, lambda case, device: {}, OneProcess(), text="")


def test_what_a_rank_raises_comes_with_its_traceback_even_when_it_cannot_be_pickled() -> None:
    class Odd(Exception):
        pass

    def fails(error: Exception) -> Callable[[int], None]:
        def program(rank: int) -> None:
            raise error

        return program

    for error, kind in ((KeyError("weight"), KeyError), (Odd("weight"), RuntimeError)):
        store = torch._C._distributed_c10d.HashStore()
        found = run_rank(fails(error), (), rank=0, world_size=1, store=store, seed=0, timeout_s=10)
        assert type(found.error) is kind and "weight" in found.detail
        assert "raise error" in "".join(found.error.__notes__)
        assert "test_rank_task.py" in found.caller and not torch.distributed.is_initialized()


def test_a_recording_that_is_read_while_it_is_written_has_every_call_once() -> None:
    file = anonymous_file()
    recorder, recording = FlightRecorder(file), Recording(file)
    recording.begin(1)
    assert recording.read() == ReadCalls()
    recorder.begin(1)
    recorder.makes_group("1", (0, 1))
    assert [call.group for _, call in recording.read().new] == ["1"]
    for count in (0, 1):  # a number is cleared before it is written
        recorder._put(_COUNT, count)
        assert recording.read().new == ()
    recorder.makes_group("2", (0, 1))
    assert [call.group for _, call in recording.read().new] == ["2"]
    os.close(file)
