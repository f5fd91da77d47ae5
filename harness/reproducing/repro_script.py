"""The body of a script that repeats one failure with plain torch; `repro` writes it to a file with its facts.

The script starts the ranks itself on gloo (or is started by torchrun) and calls the subject on each. Then it joins the
blocks of one tensor and compares it with its truth, which the facts carry. Exit status: 0 not reproduced, 1 reproduced,
2 undecided. Imports nothing but the standard library, torch and the subject. Times are seconds.
"""

import base64
import contextlib
import datetime
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import math
import os
import queue
import sys
import tempfile
import time
import traceback
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.tensor import DTensor

GONE, REPRODUCED, UNDECIDED = 0, 1, 2
LIMIT_S = 120.0


class WordsOfCase:
    """The words of the case as attributes, and what follows from them; equal to nothing but itself."""

    def __init__(self, words: Mapping[str, Any]) -> None:
        self.__dict__.update(words)

    def but(self, **words: Any) -> "WordsOfCase":
        """This case with other words. What follows from them is not computed again."""
        return WordsOfCase({**self.__dict__, **words})

    def axis_rank(self, axis: str, rank: int) -> int:
        """The place of a rank in its group along an axis."""
        return next(list(ranks).index(rank) for ranks in self.__dict__["axes"][axis] if rank in ranks)

    def samples(self, step: int, micro: int, dp_rank: int, batch: int) -> range:
        """The numbers of the samples in a micro-batch on a data rank."""
        number = (step * self.__dict__["micro"] + micro) * self.__dict__["dp"] + dp_rank
        return range(number * batch, (number + 1) * batch)


class Planted(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports modules with a planted bug from their changed source."""

    def __init__(self, packed: Mapping[str, str]) -> None:
        self.packed = packed

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The module's own spec, with this as its loader."""
        found = importlib.machinery.PathFinder.find_spec(fullname, path) if fullname in self.packed else None
        return found and importlib.util.spec_from_file_location(fullname, found.origin, loader=self)

    def exec_module(self, module: Any) -> None:
        """Execute the changed source."""
        text = zlib.decompress(base64.b64decode(self.packed[module.__name__])).decode()
        exec(compile(text, module.__file__, "exec"), module.__dict__)


def case_of(facts: Mapping[str, Any]) -> Any:
    """The case: its words, or for a subject of shardproof its own kind of case."""
    if not facts["case_text"]:
        return WordsOfCase(facts["case"])
    module, _, name = "shardproof.reference.case:Case".partition(":")
    return getattr(importlib.import_module(module), name).parse(facts["case_text"])


def boxes(value: Any) -> list[tuple[Tensor, tuple[int, ...], tuple[int, ...]]]:
    """Boxes of a returned value, (local, offsets, full shape) each: a tensor, a number, a DTensor, a shard, or several.

    Raises TypeError for anything else.
    """
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, int | float):
        value = torch.tensor(value, dtype=torch.float64)
    if isinstance(value, Tensor):
        return [(value.detach().cpu(), (0,) * value.dim(), tuple(value.shape))]
    if hasattr(value, "local"):
        return [(value.local.detach().cpu(), tuple(value.offsets), tuple(value.global_shape))]
    if isinstance(value, Iterable):
        return [box for part in value for box in boxes(part)]
    raise TypeError(f"cannot read a value of type {type(value).__name__}")


def judge_outcomes(ranks: list[list[tuple[Tensor, tuple[int, ...], tuple[int, ...]]]], facts: Mapping[str, Any]) -> int:
    """Compare what all ranks returned under the name with the facts, and print the result."""
    name, shape = facts["name"], tuple(facts["shape"])
    full = torch.full(shape, math.nan, dtype=torch.float64)
    first: dict[tuple[int, ...], tuple[int, Tensor]] = {}
    for rank, parts in enumerate(ranks):
        for local, offsets, stated in parts:
            if stated != shape:
                print(f"{name}: rank {rank} says the full shape is {stated}, it is {shape}")
                return REPRODUCED
            other, kept = first.setdefault((*offsets, *local.shape), (rank, local))
            if not torch.equal(kept.nan_to_num(), local.nan_to_num()):
                gap = float((kept.double() - local.double()).abs().max())
                print(f"{name}: rank {rank} differs from rank {other} by up to {gap:.3g}, allowed 0")
                return REPRODUCED
            full[tuple(slice(o, o + n) for o, n in zip(offsets, local.shape, strict=True))] = local.double()
    if not first:
        print(f"{name}: no rank returned it")
        return UNDECIDED
    values = torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(facts["truth"]))), dtype=torch.float64)
    wrong = full - values.view(shape)
    if facts["measure"] == "peak":  # an element within rounding of its own size is right
        wrong = wrong.masked_fill(wrong.abs() <= facts["own"] * values.view(shape).abs(), 0.0)
    size = wrong.abs().max() if facts["measure"] == "peak" else wrong.square().mean().sqrt()
    if facts["measure"] == "scale":  # how far <x, t> / <t, t> is from 1
        size = (wrong * values.view(shape)).mean().abs() / values.square().mean().sqrt()
    found = float(size) / (facts["scale"] or 1.0)
    print(f"{name}: {facts['measure']} error {found:.3g}, allowed {facts['allowed']:.3g}")
    return GONE if found <= facts["allowed"] else REPRODUCED


def on_rank(facts: Mapping[str, Any], rank: int, store: str) -> int:
    """Run the subject on this rank. Rank 0 judges and returns the answer; the others return GONE unless they fail."""
    world_size = facts["world_size"]
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=LIMIT_S / 2)
    method = f"file://{store}" if store else "env://"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=world_size, timeout=limit)
    try:
        if facts.get("planted"):
            sys.meta_path.insert(0, Planted(facts["planted"]))
        module, _, name = facts["subject"].partition(":")
        torch.manual_seed(facts["seed"])
        subject = getattr(importlib.import_module(module), name)
        with getattr(subject, "session", contextlib.nullcontext)():
            outcome = subject(case_of(facts), torch.device("cpu"))
            mine = boxes(outcome[facts["name"]]) if facts["name"] in outcome else []
        everybody: list[Any] = [None] * world_size
        dist.all_gather_object(everybody, mine)
        return judge_outcomes(everybody, facts) if rank == 0 else GONE
    except BaseException:  # also if a subject calls sys.exit
        traceback.print_exc()
        return REPRODUCED if facts["measure"] == "run" else UNDECIDED
    finally:
        dist.destroy_process_group()


def run_spawned_process(facts: Mapping[str, Any], rank: int, store: str, answers: Any) -> None:
    """Run one process, and send its answer to the parent."""
    answers.put((rank, on_rank(facts, rank, store)))


def answers_of(processes: Sequence[Any], answers: Any) -> list[int]:
    """The answers of all ranks, or those up to the first failure, after which the others may wait forever.

    Raises queue.Empty if there is none in time, or if a process ended without one.
    """
    statuses: list[int] = []
    end_s = time.monotonic() + LIMIT_S
    while len(statuses) < len(processes) and not any(statuses):
        gone = sum(process.exitcode is not None for process in processes) > len(statuses)
        try:
            statuses.append(answers.get(timeout=1.0)[1])
        except queue.Empty:
            if gone or time.monotonic() > end_s:
                raise
    return statuses


def main(facts: Mapping[str, Any]) -> int:
    """The exit status. Under torchrun this process is one rank, otherwise it starts them all."""
    sys.path.insert(0, os.getcwd())
    if "RANK" in os.environ:
        return on_rank(facts, int(os.environ["RANK"]), "")
    # A forked rank need not import torch again. Nothing has computed before, so no threads are lost.
    context: Any = mp.get_context("fork" if sys.platform == "linux" else "spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        ranks = range(facts["world_size"])
        processes = [
            context.Process(target=run_spawned_process, args=(facts, rank, store, answers), daemon=True)
            for rank in ranks
        ]
        for process in processes:
            process.start()
        try:
            found = answers_of(processes, answers)
        except queue.Empty:
            print(f"no answer within {LIMIT_S:g} s, or a process that ended without one")
            return REPRODUCED if facts["measure"] == "run" else UNDECIDED
        finally:
            for process in processes:
                process.kill()  # a rank that waits for a dead one does not end by itself
    verdict = REPRODUCED if REPRODUCED in found else UNDECIDED if UNDECIDED in found else GONE
    print({GONE: "not reproduced", REPRODUCED: "reproduced", UNDECIDED: "undecided"}[verdict])
    return verdict
