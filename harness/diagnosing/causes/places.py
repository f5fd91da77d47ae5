"""Where a name of an outcome belongs: step, phase, module, its turn in training, and the ranks that hold it wrong."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from shardproof.harness.checking.measures.kinds import is_state, kind_of, step_of
from shardproof.harness.checking.records import Claims, RecordedRun, Truth
from shardproof.harness.diagnosing.causes.proofs import share_left
from shardproof.harness.outcome.blocks import Block
from shardproof.harness.outcome.merging import Outcomes

_PHASES = {
    "init": "forward",
    "mask": "forward",
    "act": "forward",
    "routing": "forward",
    "logits": "forward",
    "loss_scale": "loss",
    "loss": "loss",
    "metric": "metric",
    "act_grad": "backward",
    "grad": "backward",
    "tokens": "grad_sync",
    "skipped": "grad_sync",
    "grad_norm": "grad_sync",
    "param": "step",
    "saved": "checkpoint",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a name of an outcome is computed: step, phase and module path ("" if it is in no module)."""

    step: int
    phase: str
    module: str


def place_of(name: str, steps: int) -> Place:
    """Where an outcome name belongs: "grad/layers.0.mlp.w1.weight" is step 0, backward, layers.0.mlp.w1."""
    kind, _, rest = name.partition("/")
    if is_state(name):
        return Place(step=step_of(name), phase="step", module=rest.partition("/")[2].rpartition(".")[0])
    phase = _PHASES.get(kind, "")
    if kind in ("mask", "routing"):
        step, _, site = rest.partition("/")
        return Place(step=int(step) if step.isdecimal() else 0, phase=phase, module=site.removesuffix(".shares"))
    if kind == "saved":  # saved/param/<parameter>, saved/exp_avg_after/<step>/<parameter>
        return Place(step=steps - 1, phase=phase, module=rest.rpartition("/")[2].rpartition(".")[0])
    if kind in ("act", "act_grad"):
        return Place(step=0, phase=phase, module=rest)
    if kind in ("init", "grad", "param"):
        return Place(step=steps - 1 if kind == "param" else 0, phase=phase, module=rest.rpartition(".")[0])
    named = step_of(name)  # the number may be that of a layer, in a name without a step
    return Place(step=named if 0 <= named < steps else 0, phase=phase, module="")


def order_by_time(names: Sequence[str], steps: int) -> list[str]:
    """These names in the order in which training computes them. Those of one kind must be given in forward order."""
    of_kind: dict[str, list[str]] = {}
    for name in names:
        of_kind.setdefault(kind_of(name), []).append(name)
    masks, choices = of_kind.get("mask", ()), of_kind.get("routing", ())
    order = [*of_kind.get("init", ()), *(name for name in masks if step_of(name) == 0), *of_kind.get("act", ())]
    order += [name for name in choices if step_of(name) == 0]
    for step in range(steps):
        order += [name for name in (*masks, *choices) if step and step_of(name) == step]
        forward = ("logits", "loss_scale", "loss")
        order += [name for kind in forward for name in of_kind.get(kind, ()) if name == f"{kind}/{step}"]
        if step == 0:
            order += [name for kind in ("act_grad", "grad") for name in reversed(of_kind.get(kind, ()))]
        summed = ("tokens", "skipped", "grad_norm")
        order += [name for kind in summed for name in of_kind.get(kind, ()) if name == f"{kind}/{step}"]
        order += reversed([name for name in names if is_state(name) and step_of(name) == step])
    order += reversed(of_kind.get("param", ()))
    placed = set(order)
    others = [name for name in names if name not in placed]  # of a subject's own kinds, those without a step come last
    return order + sorted(others, key=lambda name: step_of(name) if 0 <= step_of(name) < steps else steps)


def update_in_doubt(run: RecordedRun, truth: Truth, name: str, wrong: Collection[str], *, tried: bool = False) -> int:
    """The step whose update may have caused this first wrong name, which belongs to the step after it; -1 for none.

    An update is not in doubt if all parameters after it were returned and are right. Right logits, a right loss or a
    right gradient norm in the next step clear it too, unless the case is `tried` with fewer steps: a small error of an
    update moves these by less than their limits. Tensors that were not returned show nothing. If every step is compared
    from the subject's own state, an update causes no errors in later steps.
    """
    known, step = {*run.tensors} & {*truth.tensors}, 0
    if kind_of(name) in ("logits", "loss", "grad_norm", "routing", "param") or is_state(name):
        step = place_of(name, run.case.steps).step
    right = known - {*wrong}
    parameters = {other.partition("/")[2] for other in truth.tensors if kind_of(other) in ("param", "grad")}
    kept = parameters and all(f"param_after/{step - 1}/{parameter}" in right for parameter in parameters)
    followed = not tried and any(f"{kind}/{step}" in right for kind in ("logits", "loss", "grad_norm"))
    return -1 if step < 1 or kept or followed or truth.controls.states is not None else step - 1


def wrong_ranks(run: RecordedRun, truth: Truth, name: str) -> tuple[int, ...]:
    """Ranks whose error exceeds a thousandth of the largest one; if some errors are not finite, only these ranks.

    Empty if all ranks are wrong, or if the tensor cannot be compared with the truth.
    """
    true = truth.tensors.get(name)
    if true is None or not true.is_floating_point() or not is_comparable(run, truth, name):
        return ()
    gaps = {
        rank: max((_largest_error(block, true) for block in blocks), default=0.0)
        for rank, blocks in blocks_of(run, name).items()
    }
    finite = [gap for gap in gaps.values() if math.isfinite(gap)]
    limit = 1e-3 * max(finite, default=0.0) if len(finite) == len(gaps) else max(finite, default=0.0)
    wrong = tuple(rank for rank, gap in gaps.items() if gap > limit)
    return wrong if len(wrong) < len(run.outcomes) else ()


def ranks_apart(run: RecordedRun, truth: Truth, names: Sequence[str]) -> tuple[set[int], set[int]]:
    """Ranks that hold one of these tensors wrong, and ranks that hold all of theirs right, up to rounding.

    Ranks that hold no element of them are in neither set. Both are empty if a tensor cannot be compared with the truth.
    """
    bad, judged = set[int](), set[int]()
    for name in names:
        true = truth.tensors.get(name)
        if true is None or not true.is_floating_point() or not is_comparable(run, truth, name):
            return set(), set()
        for rank, blocks in blocks_of(run, name).items():
            if any(block.reduce_op for block in blocks):
                return set(), set()
            if not any(block.local.numel() for block in blocks):
                continue
            limits = (share_left(block.local) * float(true.double().abs().max()) for block in blocks)
            judged.add(rank)
            if any(_largest_error(block, true) > limit for block, limit in zip(blocks, limits, strict=True)):
                bad.add(rank)
    return bad, judged - bad


def _largest_error(block: Block, truth: Tensor) -> float:
    """The largest error of a block, infinite if it is NaN; 0 if the truth has nothing that the block should equal."""
    if block.global_shape != tuple(truth.shape) or not block.local.numel() or block.reduce_op:
        return 0.0
    gap = float((block.local.double() - block.part_of(truth).double()).abs().max())
    return math.inf if math.isnan(gap) else gap


def held_whole(run: RecordedRun, name: str) -> bool:
    """Whether every rank that holds this tensor holds all of it."""
    return all(
        sum(part.local.numel() for part in parts) == math.prod(parts[0].global_shape)
        for parts in blocks_of(run, name).values()
    )


def is_comparable(run: RecordedRun, truth: Truth, name: str) -> bool:
    """Whether every block of this name has the truth's full shape, and is floating-point exactly if the truth is.

    True for a name without a truth.
    """
    true = truth.tensors.get(name)
    if true is None:
        return True
    form = tuple(true.shape), true.is_floating_point()
    return all(
        (block.global_shape, block.local.is_floating_point()) == form
        for blocks in blocks_of(run, name).values()
        for block in blocks
    )


def blocks_of(run: RecordedRun, name: str) -> dict[int, Sequence[Block]]:
    """Rank -> its blocks of this name, returned or captured."""
    sources: tuple[Outcomes, ...] = (run.outcomes, run.captured)
    return {rank: by[name] for outcomes in sources for rank, by in enumerate(outcomes) if by.get(name)}


def is_summable(run: RecordedRun, claims: Claims, axis: str, name: str) -> bool:
    """Whether one more sum over this axis would multiply this tensor.

    It would if the ranks of a group hold equal parts, or parts from a reduce-scatter over the axis. It would not if
    they hold other data (rows of an activation) or other parts of a weight, since the sum would mix these.
    """
    ranks = claims.axes.get(axis, (tuple(range(run.case.world_size)),))[0]
    blocks = blocks_of(run, name)
    regions = [tuple(block.region for block in blocks[rank]) for rank in ranks if rank in blocks]
    if len(set(regions)) <= 1:
        return True
    if kind_of(name) in ("act", "act_grad", "logits"):
        return len({tuple(region[0] for region in of_rank) for of_rank in regions}) == 1
    events = run.calls.events  # two launches have no events: there ranks of dp are taken to sum
    summed = any(event.op == "reduce_scatter" and event.axis == axis for event in events) if events else axis == "dp"
    return summed and kind_of(name) != "init"
