"""Laws of experts that no single case shows: one batch however it is grouped, both dispatchers, checkpoints."""

from pathlib import Path

import torch
from torch import Tensor

from harness.engines.threads.inproc import InprocEngine
from harness.outcome.merging import merge
from harness.running.ranks.execution import execute
from parallel.subject import subject
from reference.case import Case
from reference.model.parameters import drawn

SIZES = (
    "layers=2 heads=4 kv_heads=4 hidden=16 ffn=24 vocab=67 seq=16 batch=2 steps=2 lr=0.1 expert_ffn=12 experts=8"
    " delivery=local"
)
BALANCED = "aux_loss=1.0 sequence_loss=0.5 z_loss=0.1"


def outcome(words: str) -> dict[str, Tensor]:
    case = Case.parse(f"{SIZES} {words}")
    with InprocEngine() as engine:
        run = execute(case, subject, engine, text="", record=False)
    return dict(merge(run.outcomes).tensors)


def far(found: dict[str, Tensor], must: dict[str, Tensor], *kinds: str) -> float:
    """The largest relative error among tensors of these kinds."""
    names = [name for name in must if name.startswith(kinds)]
    assert names and {*names} <= found.keys()
    return max(float((found[n] - must[n]).abs().max() / must[n].abs().max().clamp(min=1e-9)) for n in names)


def test_balance_losses_weigh_the_same_however_a_batch_is_grouped() -> None:
    """Effective factor 1 at every tp, cp, dp and number of micro-batches (experts.md 21.5), to rounding."""
    alone = outcome(f"mode=tp tp=1 dp=1 micro=4 {BALANCED}")
    plain = outcome("mode=tp tp=1 dp=1 micro=4")
    router = "grad/layers.0.mlp.router.weight"
    assert far({router: plain[router]}, {router: alone[router]}, "grad/") > 0.1, "they count"
    for grouping in (
        "mode=tp-sp tp=2 dp=2 micro=2 ep=2 etp=1",
        "mode=tp tp=2 cp=2 micro=4 ep=2",
        "mode=tp tp=1 cp=2 dp=4 micro=1 ep=4",
        "mode=msp tp=2 pp=2 dp=2 micro=2 etp=1 ep=4",
    ):
        found = outcome(f"{grouping} {BALANCED}")
        assert far(found, alone, "grad/", "param/", "loss/", "grad_norm/") < 1e-10, grouping


def test_a_capacity_of_the_micro_batch_drops_the_same_rows_on_any_ranks() -> None:
    """Other than one of each rank's tokens, which depends on who holds them (experts.md 21.3)."""
    for words in ("", "routing=skewed drop=position"):
        capacity = f"capacity=0.7 {words} capacity_of"
        alone = outcome(f"mode=tp tp=1 dp=1 micro=4 {capacity}=micro-batch")
        grouping = "mode=tp-sp tp=2 cp=2 dp=2 micro=2 ep=2 etp=1"
        assert far(outcome(f"{grouping} {capacity}=micro-batch"), alone, "grad/", "param/", "loss/") < 1e-10
        assert far(outcome(f"{grouping} {capacity}=rank"), alone, "grad/") > 1e-3, "other rows are dropped"


def test_both_dispatchers_make_the_same_of_one_choice() -> None:
    for words in ("mode=tp-sp tp=2 dp=2 ep=2", "mode=tp tp=2 dp=2 ep=4 etp=1 capacity=1.0"):
        one, other = (outcome(f"{words} dispatcher={dispatcher}") for dispatcher in ("alltoall", "allgather"))
        assert far(one, other, "grad/", "param/") < 1e-10
        assert all(torch.equal(one[name], other[name]) for name in one if name.startswith("routing/"))


def test_a_checkpoint_of_experts_goes_on_at_another_layout(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    whole = outcome("mode=tp tp=1 steps=4 optimizer=adamw lr=0.01 clip=0.05 micro=2 routing=skewed")
    words = "optimizer=adamw lr=0.01 clip=0.05 routing=skewed"
    outcome(f"mode=tp-sp tp=2 dp=2 micro=1 ep=4 etp=1 zero=1 save={folder} {words}")
    found = outcome(f"mode=tp tp=2 cp=2 ep=2 micro=2 load={folder} {words}")
    assert far(found, {name: one for name, one in whole.items() if name.startswith("param/")}, "param/") < 1e-9


def test_an_expert_without_tokens_moves_by_weight_decay_alone() -> None:
    """Property 8 of experts.md 21.7: AdamW with a decay of 0.01 leaves 1 - lr * 0.01 of it a step."""
    words = "mode=tp-sp tp=2 dp=2 ep=4 etp=1 micro=2 routing=one optimizer=adamw lr=0.1"
    found, before = outcome(words), Case.parse(f"{SIZES} {words}")
    for name in ("layers.0.mlp.experts.up.weight", "layers.1.mlp.experts.down.weight"):
        rows = found[f"routing/0/{name.partition('.experts')[0]}"].sum((0, 1))
        from_start = drawn(before, name)
        for expert in range(8):
            left = from_start[expert] * (1 - 0.1 * 0.01) ** 2
            assert torch.allclose(found[f"param/{name}"][expert], left, rtol=1e-12) == bool(rows[expert] == 0)
