"""Data-parallel training of two layers, right in every thread that can compute, and digests of cases of it as JSON.

MKL would spread the products over the processors: 6 rows through 16x64 in float32 then come out with other last bits.

    python -m tests.harness.running.subjects.first_products NUMBER SUBJECT CASE ...

NUMBER is that of torch's threads in the process that proves the cases, in this order. Shapes: R rows, D 16, H 64.
"""

import hashlib
import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.ledger import REPEATABLE
from shardproof.harness.running.proof import prove
from shardproof.harness.running.result import CaseResult
from shardproof.harness.subject import case_of, resolve_subject

D, H, ROWS = 16, 64, 6


def started(work: Callable[[], Tensor]) -> Tensor:
    """The result of this work in a new thread."""
    results: list[Tensor] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def submitted(work: Callable[[], Tensor]) -> Tensor:
    """The result of this work in a thread of an executor."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(work).result()


WAYS: Mapping[str, Callable[[Callable[[], Tensor]], Tensor]] = {
    "rank": lambda work: work(),
    "thread": started,
    "executor": submitted,
}


def trained(case: Any, data_ranks: list[int], summed: Callable[[Tensor], object]) -> dict[str, Tensor]:
    """SGD on the samples of these data ranks; `summed` adds a gradient up over the ranks."""
    dtype = getattr(torch, case.dtype)
    generator = torch.Generator().manual_seed(case.seed)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) / 8 for shape in ((H, D), (D, H))]
    w1, w2 = (weight.to(dtype).requires_grad_() for weight in drawn)
    optimizer, outcome = torch.optim.SGD((w1, w2), lr=0.1), dict[str, Tensor]()
    for step in range(case.steps):
        total = torch.zeros((), dtype=dtype)
        for data_rank in data_ranks:
            numbers = case.samples(step, 0, data_rank, ROWS)
            rows = [torch.randn(D, generator=torch.Generator().manual_seed(number)) for number in numbers]
            total += WAYS[case.way](partial(_backward, case, torch.stack(rows).to(dtype), w1, w2))
        for name, tensor in (("loss", total), ("grad/w1", w1.grad), ("grad/w2", w2.grad)):
            assert tensor is not None
            summed(tensor)
            if name == "loss" or step == 0:
                outcome[f"{name}/{step}" if name == "loss" else name] = tensor.clone()
        optimizer.step()
        optimizer.zero_grad()
    return outcome | {"param/w1": w1.detach(), "param/w2": w2.detach()}


def _backward(case: Any, x_RD: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Loss of these rows, which has gone backward."""

    def forward(x_RD: Tensor) -> Tensor:
        return torch.relu(x_RD @ w1.T) @ w2.T

    y_RD = checkpoint(forward, x_RD, use_reentrant=False) if case.again else forward(x_RD)
    loss: Tensor = y_RD.square().sum() / (ROWS * case.dp)
    loss.backward()
    return loss.detach()


def truth(case: Any, device: torch.device) -> dict[str, Tensor]:
    """The samples of all data ranks, one after the other."""
    return trained(case, list(range(case.dp)), lambda tensor: None)


def subject(case: Any, device: torch.device) -> dict[str, Tensor]:
    """The samples of this rank."""
    return trained(case, [dist.get_rank()], dist.all_reduce)


subject.truth = truth  # type: ignore[attr-defined]
subject.words = {"way": tuple(WAYS), "again": False, "micro": (1,)}  # type: ignore[attr-defined]
subject.cases = ("dp=2",)  # type: ignore[attr-defined]
subject.refuses = lambda case: "dp alone" if case.world_size != case.dp or case.micro > 1 else ""  # type: ignore[attr-defined]


def digests(given: Any, cases: Sequence[str]) -> dict[str, str]:
    """By case, proved one after the other: the verdict, and a digest of outcomes, errors and ledger."""
    stated, found = resolve_subject(given), dict[str, str]()
    with InprocEngine() as engine:
        for case in cases:
            found[case] = digest_of(prove(case_of(case, stated), stated, engine))
    return found


def digest_of(result: CaseResult) -> str:
    """The verdict, and a digest of every tensor, error and call."""
    hashed = hashlib.sha256()
    for part in _parts(result):
        hashed.update(part)
    return f"{result.verdict} {hashed.hexdigest()[:16]}"


def _parts(result: CaseResult) -> Iterator[bytes]:
    assert result.evidence is not None, result.verdicts
    outcomes: list[Mapping[str, Any]] = [
        *result.evidence.run.outcomes,
        result.evidence.truth.tensors,
        result.evidence.run.tensors,
    ]
    for outcome in outcomes:
        for name, value in sorted(outcome.items()):
            for tensor in (value,) if isinstance(value, Tensor) else (block.local for block in value):
                yield f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
                yield tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    for verdict in result.verdicts:
        yield repr(verdict).encode()
    for event in result.events:
        yield repr([getattr(event, column) for column in REPEATABLE]).encode()


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    print(json.dumps(digests(sys.argv[2], sys.argv[3:])))
