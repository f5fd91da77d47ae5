"""A run lets go of its variables, a finished one of its results; buckets do not outlive their ranks."""

import gc
import time
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardproof.harness.engines.threads import scheduler
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.running.ranks.execution import execute
from shardproof.parallel.data_parallel.buckets import Buckets
from shardproof.parallel.subject import subject
from shardproof.reference.case import Case


class Trial:
    """Stands for what a run must let go of."""


def test_a_group_that_outlives_its_run_keeps_none_of_its_results() -> None:
    groups: list[Any] = []

    def leaky(case: Any, device: torch.device) -> Mapping[str, Tensor]:
        groups.append(dist.distributed_c10d._get_default_group())
        return {"loss/0": torch.ones(())}

    trial = Trial()
    known = weakref.ref(trial)
    with InprocEngine() as engine:
        engine.alive = partial(id, trial)
        execute(Case.parse("mode=tp tp=2"), leaky, engine)
        engine.alive = str
        del trial
        gc.collect()
        assert len(groups) == 2 and known() is None


def test_a_look_at_the_ranks_keeps_none_of_their_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[weakref.ref[Trial]] = []

    def program(rank: int) -> None:
        trial = Trial()
        known.append(weakref.ref(trial))
        time.sleep(0.1)  # the driver looks on, whether a rank compiles

    monkeypatch.setattr(scheduler, "_LISTEN_S", 0.01)
    with InprocEngine() as engine:
        gc.disable()
        try:
            engine.run(program, world_size=2)
            assert [one() for one in known] == [None, None]
        finally:
            gc.enable()


@pytest.mark.parametrize("words", ["wgrad=plain", "wgrad=fused", "wgrad=deferred"])
def test_buckets_do_not_outlive_their_ranks(words: str, engine: InprocEngine) -> None:
    execute(Case.parse(f"mode=tp tp=1 dp=2 zero=1 steps=1 {words}"), subject, engine)
    gc.collect()
    assert [one for one in gc.get_objects() if type(one) is Buckets] == []
