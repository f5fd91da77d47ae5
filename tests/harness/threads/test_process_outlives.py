"""A process survives ranks that used DTensor, however they end, and a finished run keeps none of its variables alive.

The caches of DTensor abort a process when they outlive their thread. The process ends even if threads of its ranks are
blocked for good. Neither results nor buckets outlive their run.
"""

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shardproof.harness.engines.threads import scheduler
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.errors import ShardproofError
from shardproof.harness.running.ranks.execution import execute
from shardproof.parallel.data_parallel.buckets import Buckets
from shardproof.parallel.subject import subject
from shardproof.reference.case import Case
from tests import ROOT


class Trial:
    """An object that must not outlive its run."""


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
        time.sleep(0.1)  # meanwhile the driver looks whether a rank compiles

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


def test_the_process_outlives_a_rank_that_used_dtensor_and_ends_though_threads_are_blocked() -> None:
    command = [sys.executable, "-m", "tests.harness.threads.test_process_outlives"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "RankRaised: rank 0 of 2 raised RuntimeError: a user's mistake",
        "RankRaised: rank 0 of 2 raised RuntimeError: aten.mv.default got mixed torch.Tensor and DTensor",
        "RankRaised: rank 0 of 2 raised SystemExit: 3",
        "RankRaised: rank 0 of 2 raised RuntimeError: a user's mistake",
        "TimeLimit: no end within 0.5 s: rank 0 runs",
        "outlived",
        "TimeLimit: no end within 0.5 s: rank 0 is blocked",
    ]


def _doubled(mesh: DeviceMesh) -> Tensor:
    x = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)], run_check=False)
    return (x + x) * 2


def _raises(mesh: DeviceMesh) -> None:
    _doubled(mesh)
    raise RuntimeError("a user's mistake")


def _misuses(mesh: DeviceMesh) -> None:
    torch.mv(_doubled(mesh), torch.ones(4))


def _exits(mesh: DeviceMesh) -> None:
    _doubled(mesh)
    sys.exit(3)


def _raises_in_a_thread(mesh: DeviceMesh) -> None:
    with ThreadPoolExecutor(1) as threads:
        threads.submit(_raises, mesh).result()


def _stays(mesh: DeviceMesh) -> None:
    _doubled(mesh)
    while True:
        time.sleep(0.001)


def _blocks_for_ever(mesh: DeviceMesh) -> None:
    threading.Thread(target=threading.Event().wait).start()
    ThreadPoolExecutor(1).submit(threading.Event().wait).result()


def _ended(engine: InprocEngine, program: Callable[[DeviceMesh], object]) -> ShardproofError:
    limit_s = 0.5 if program in {_stays, _blocks_for_ever} else 30
    try:
        engine.run(lambda rank: program(init_device_mesh("cpu", (2,))), world_size=2, timeout_s=limit_s)
    except ShardproofError as error:
        return error
    raise AssertionError("the program does not end by itself")


def _said(error: ShardproofError) -> str:
    cause = str(error).splitlines()[0].partition(", at ")[0].partition(" at ")[0].partition(", need")[0]
    return f"{type(error).__name__}: {cause}"


if __name__ == "__main__":
    kept = []
    with InprocEngine() as first:
        for program in (_raises, _misuses, _exits, _raises_in_a_thread, _stays):
            kept.append(_ended(first, program))  # its traceback keeps frames of the thread
            print(_said(kept[-1]), flush=True)
    time.sleep(0.3)  # the threads end
    kept.clear()
    gc.collect()
    print("outlived", flush=True)
    with InprocEngine() as second:
        print(_said(_ended(second, _blocks_for_ever)), flush=True)
