"""A finished run lets go of its results though a program leaks a group; the project's own buckets leak nothing."""

import gc
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from harness.engines.threads.inproc import InprocEngine
from harness.running.ranks.execution import execute
from parallel.data_parallel.buffers import Buckets
from parallel.subject import subject
from reference.case import Case


class Trial:
    """Stands for the truth and the results, to which the engine's `alive` refers."""


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


@pytest.mark.parametrize("words", ["wgrad=plain", "wgrad=fused", "wgrad=deferred"])
def test_buckets_do_not_outlive_their_ranks(words: str, engine: InprocEngine) -> None:
    execute(Case.parse(f"mode=tp tp=1 dp=2 zero=1 steps=1 {words}"), subject, engine)
    gc.collect()
    assert [one for one in gc.get_objects() if type(one) is Buckets] == []
