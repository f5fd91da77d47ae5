"""Whether anything was trained at all: what is dead on both sides agrees, and proves nothing.

Dead are gradients that are zero everywhere or that no parameter receives, parameters that do not move, a loss that is
0 or no number (a mask that leaves nothing), and targets that are all ignored.
"""

from collections.abc import Iterator

import torch

from shardproof.harness.checking.finding import Finding
from shardproof.harness.parity.recorded import Launch
from shardproof.harness.verdicts.verdict import FAIL, PASS, UNKNOWN

CHECK = "alive"
IGNORED = -100
"""The target that torch's cross entropy leaves out unless it is told another one."""


def check_alive(first: Launch, second: Launch) -> Finding:
    """Whether both launches train: a dead one agrees with whatever is as dead."""
    for word, launch in (("first", first), ("second", second)):
        for words, name in _dead(launch):
            message = f"the {word} launch is dead, so that its parity would prove nothing: {words}"
            return Finding(verdict=FAIL, message=message, names=(name,))
    for word, launch in (("first", first), ("second", second)):
        missing = [kind for kind in ("loss", "grad", "param_after") if not any(launch.rows(kind))]
        if missing:
            what = {"loss": "no loss", "grad": "no gradient", "param_after": "no parameter after a step"}
            message = f"of the {word} launch {' and '.join(what[kind] for kind in missing)} was recorded"
            return Finding(verdict=UNKNOWN, message=message)
    return Finding(verdict=PASS, message="losses are numbers, gradients reach parameters, and parameters move")


def _dead(launch: Launch) -> Iterator[tuple[str, str]]:
    """What is dead in a launch, in words, and the name that shows it."""
    for step in range(launch.steps):
        yield from _dead_targets(launch, step)
        losses = [rank.tensor(row).double() for rank, row in launch.rows("loss", step)]
        if losses and all(bool((loss == 0).all()) for loss in losses):
            yield f"its loss is 0 in step {step} on every rank, as where a mask leaves nothing", f"loss/{step}"
        if losses and not all(bool(torch.isfinite(loss).all()) for loss in losses):
            yield f"its loss is no number in step {step}, as the mean over no target is", f"loss/{step}"
        gradients = [(row, rank.tensor(row)) for rank, row in launch.rows("grad", step)]
        if losses and not gradients and any(launch.rows("param_after", step)):
            yield f"no gradient reaches a parameter in step {step}: its loss does not depend on them", f"loss/{step}"
        if gradients and not any(bool(tensor.any()) for _, tensor in gradients):
            yield f"every gradient is zero throughout in step {step}", f"grad/{gradients[0][0].name}"
    last = launch.steps - 1
    if last >= 0:
        started = {(rank.rank, row.name, row.offsets): rank.tensor(row) for rank, row in launch.rows("param")}
        after = [(rank, row, rank.tensor(row)) for rank, row in launch.rows("param_after", last)]
        known = [(row, tensor, started[key]) for rank, row, tensor in after
                 if (key := (rank.rank, row.name, row.offsets)) in started]  # fmt: skip
        if known and all(torch.equal(tensor, before) for _, tensor, before in known):
            steps = f"{launch.steps} step{'s' if launch.steps > 1 else ''}"
            yield f"no parameter moves in {steps}", f"param_after/{last}/{known[0][0].name}"


def _dead_targets(launch: Launch, step: int) -> Iterator[tuple[str, str]]:
    """Targets, tensors of integers that the first module receives, that are all ignored."""
    places: dict[str, list[bool]] = {}
    for rank, row in launch.rows("sample", step):
        if "int" in row.dtype:
            places.setdefault(row.name, []).append(bool((rank.tensor(row) == IGNORED).all()))
    for name, ignored in places.items():
        if all(ignored):
            yield f"every target is ignored ({name} is {IGNORED} throughout) in step {step}", f"sample/{step}"
