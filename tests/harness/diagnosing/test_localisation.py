"""Planted bugs are traced to their first place and cause: one of every kind that needs a rule of its own.

Whether that holds for the whole catalogue of mutants is the kill matrix's business; here each rule is seen to work.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from bugs.planting import planted, replaced
from harness.engines.engine import Engine
from harness.engines.named import engine_named
from harness.running.proof import prove
from reference.case import Case

SIZES = "layers=2 heads=4 kv_heads=2 hidden=16 ffn=24 seq=8 vocab=264 lr=0.1"
TP, SP = f"mode=tp tp=2 {SIZES}", f"mode=tp-sp tp=2 {SIZES}"
DP, FSP = f"mode=tp tp=2 dp=3 {SIZES}", f"mode=fsp family=internlm2 tp=2 {SIZES}"
BACKWARD = "        summed.backward()\n"
CLEARED = "        rank.model.zero_grad()\n"
HALVED = "        [p.grad.div_(2) for p in rank.parameters.values()]\n"
REDUCED = "grad_x = reduced.wait()"
READ = 'batch = micro_batch(case, step, micro, mesh.axis("dp").rank) if reads else None'
SUMMED = "summed = all_reduce(torch.cat([gradient.flatten() for gradient in group]), axis, op=op)"
COUNTED = "loss, tokens = sync.sum_scalars(loss, tokens, [mesh.axis(axis) for axis in strategy.loss_axes])"
ZEROED = "        optimizer.zero_grad()\n"
LEFT = "pairs.reduce_scatter_to_sequence(y, self.axis"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """A text of a module that reads otherwise, and what a diagnosis must say: "" as cause is any or none."""

    text: str
    module: str
    old: str
    new: str
    first: tuple[str, str]
    cause: str = ""


BUGS = {
    "input gradient of the head halved": Bug(
        text=TP,
        module="layers.linear",
        old=REDUCED,
        new=f"{REDUCED} / 2",
        first=("backward", "head"),
        cause="constant_factor",
    ),
    "input gradient of one linear halved": Bug(
        text=TP,
        module="layers.linear",
        old=REDUCED,
        new=f"{REDUCED} / (1 + (weight.shape[0] == 12))",
        first=("backward", "layers.1.mlp.w1"),
        cause="averaged",
    ),
    "residual detached": Bug(
        text=TP,
        module="model.transformer",
        old="y: Tensor = x + self._dropped",
        new="y: Tensor = x.detach() + self._dropped",
        first=("backward", "layers.1"),
    ),
    "gradients of what is whole averaged": Bug(
        text=SP,
        module="communication.gradients",
        old=SUMMED,
        new=f"{SUMMED} / axis.size",
        first=("grad_sync", "final_norm"),
        cause="averaged",
    ),
    "all gradients divided once more": Bug(
        text=TP,
        module="training.loop",
        old="gradient.div_(tokens * shares)",
        new="gradient.div_(tokens * shares * 2)",
        first=("grad_sync", "head"),
        cause="constant_factor",
    ),
    "the last micro-batch overwrites": Bug(
        text=TP,
        module="training.step",
        old=BACKWARD,
        new=CLEARED + BACKWARD,
        first=("grad_sync", "head"),
        cause="micro_missing",
    ),
    "micro-batches weighed unequally": Bug(
        text=TP,
        module="training.step",
        old=BACKWARD,
        new=BACKWARD + HALVED,
        first=("grad_sync", "head"),
        cause="unequal_shares",
    ),
    "tokens counted locally": Bug(
        text=DP,
        module="training.loop",
        old=COUNTED,
        new=f"{COUNTED.replace('loss, tokens', 'loss, _', 1)}\n    tokens = tokens * 3",
        first=("loss", ""),
        cause="local_count",
    ),
    "gradients not zeroed": Bug(
        text=TP,
        module="training.loop",
        old=ZEROED,
        new=f"        if step == 0:\n    {ZEROED}",
        first=("grad_sync", ""),
        cause="not_zeroed",
    ),
    "the same data in every step": Bug(
        text=TP,
        module="communication.batch",
        old=READ,
        new=READ.replace("(case, step,", "(case, 0,"),
        first=("data", ""),
        cause="batch_repeated",
    ),
    "never a step": Bug(
        text=TP,
        module="training.loop",
        old="        optimizer.step()\n",
        new="",
        first=("step", ""),
        cause="never_updated",
    ),
    "a norm that counts replicas": Bug(
        text=TP,
        module="communication.gradients",
        old="axis.name in places[name].axes or axis.rank == 0",
        new="True",
        first=("grad_sync", ""),
        cause="norm_counts_replicas",
    ),
    "the loss mask ignored": Bug(
        text=TP,
        module="layers.loss",
        old="return loss_mask * (labels != IGNORED)",
        new="return (labels != IGNORED).to(loss_mask.dtype)",
        first=("loss", ""),
        cause="mask_ignored",
    ),
    "every data rank reads the first one's data": Bug(
        text=DP,
        module="communication.batch",
        old=READ,
        new=READ.replace('mesh.axis("dp").rank', "0"),
        first=("forward", "embedding"),
        cause="data_rank_repeated",
    ),
    "rows of another layout": Bug(
        text=FSP,
        module="layers.linear",
        old=LEFT,
        new=LEFT.replace("(y,", "(y.transpose(0, 1).reshape(y.shape),"),
        first=("forward", "layers.0.attention.wo"),
        cause="transposed",
    ),
    "a work that nobody waits for": Bug(
        text=f"mode=isp family=internlm2 tp=2 {SIZES}",
        module="layers.ulysses",
        old="q_pending.wait(), kv_pending.wait().unbind(2)",
        new="q_pending.wait(), kv_pending.finish().unbind(2)",
        first=("forward", "layers.0.attention"),
        cause="not_waited",
    ),
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with engine_named("inproc") as engine:
        yield engine


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_traced_to_its_place_and_cause(name: str, engine: Engine) -> None:
    bug = BUGS[name]
    wrong = planted(replaced(f"parallel.{bug.module}", bug.old, bug.new))
    diagnosis = prove(Case.parse(bug.text), wrong, engine).diagnosis
    assert diagnosis is not None
    assert (diagnosis.first.phase, diagnosis.first.region) == bug.first
    assert not bug.cause or bug.cause in {told.id for told in diagnosis.causes}
