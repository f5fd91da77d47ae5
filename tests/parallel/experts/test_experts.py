"""Tests of experts/scheme. Laws of experts that no single case shows: bytes by hand, one batch however it is
grouped, capacity, checkpoints.
"""

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardproof.parallel.communication.layout import coordinates
from shardproof.parallel.experts.counts import micro_batches, rows_sent, tokens_of
from shardproof.parallel.subject import subject
from shardproof.reference.case import Case
from shardproof.reference.data.routing import forced_experts, period
from tests.parallel.ranks import outcome


def payloads(words: str, op: str, phase: str, axis: str) -> Counter[int]:
    """Bytes of a call -> the number of such calls of one kind, on all ranks together."""
    case, found = Case.parse(words), Counter[int]()
    for term in subject.expected(case):
        if (term.op, term.phase, term.axis) == (op, phase, axis) and term.region.endswith(".mlp"):
            found[term.payload_bytes] += term.calls * (1 if term.at else case.world_size)
    return found


SIZES = "mode=tp-sp layers=1 heads=4 hidden=16 seq=16 batch=2 micro=2 steps=1 experts=8 expert_ffn=12"


def test_what_is_sent_is_received_and_equal_loads_are_arithmetic() -> None:
    """experts.md 22.2, by hand: the 16 tokens of a rank go to 2 experts each, 32 rows of 16 float64 numbers."""
    rows = 16 * 2
    found = payloads(f"{SIZES} tp=2 dp=2 ep=4 etp=1 routing=equal", "all_to_all", "forward", "ep")
    assert found == {rows * 16 * 8: 2 * 2 * 4, rows * 8: 2 * 4}
    for phase in ("forward", "backward"):
        skewed = payloads(f"{SIZES} tp=2 dp=2 ep=4 etp=1 routing=skewed", "all_to_all", phase, "ep")
        assert len(skewed) > 2, "ranks differ"
        assert skewed.total() == found.total()
        assert sum(size * calls for size, calls in skewed.items()) == sum(size * calls for size, calls in found.items())


@pytest.mark.parametrize(
    ("routing", "sizes"),
    [
        ("equal", "batch=3 dp=3"),
        ("equal skew=0.25", "batch=1 dp=2"),
        ("one", "batch=3 dp=3"),
        ("equal skew=1.0", "batch=8"),
    ],
)
def test_choices_return_after_their_period(routing: str, sizes: str) -> None:
    """Rows are counted once for all micro-batches that begin at the same place of the period."""
    words = f"{SIZES} {sizes} tp=1 ep=1 routing={routing} top_k=3 steps=2 micro=5"
    case = Case.parse(words)
    tokens = torch.arange(1000)
    assert torch.equal(forced_experts(case, 0, tokens), forced_experts(case, 0, tokens + period(case)))
    kinds = micro_batches(case)
    assert kinds.total() == 2 * 5
    for rank in range(case.world_size):
        for step in range(2):
            for micro in range(5):
                at = coordinates(case, rank)
                itself = forced_experts(case, 0, tokens_of(case, at, step, micro)).flatten(0, 1).sum(0)
                assert rows_sent(case, "layers.0", step, micro, rank) == tuple(itself.tolist())


def test_padded_rows_are_numbers_of_the_case() -> None:
    """The capacity is ceil(16 * 2 / 8 * 1.5) = 6 rows for each of 8 experts, so ranks do not exchange counts."""
    words = f"{SIZES} tp=2 dp=2 ep=4 etp=1 routing=skewed capacity=1.5 drop=position pad=true"
    assert payloads(words, "all_to_all", "forward", "ep") == {6 * 8 * 16 * 8: 2 * 2 * 4, 6 * 8 * 8: 2 * 4}
    assert payloads(words, "all_gather", "forward", "etp_ep") == {}


def test_forced_choices_load_experts_as_they_are_named() -> None:
    tokens = torch.arange(400)
    load = {
        routing: forced_experts(Case.of(experts=8, etp=1, routing=routing), 0, tokens)
        for routing in ("equal", "skewed", "empty", "one")
    }
    assert all((chosen.sum(-1) == 2).all() for chosen in load.values())
    assert load["equal"].sum(0).tolist() == [100] * 8
    assert (load["empty"].sum(0)[4:] == 0).all() and (load["empty"].sum(0)[:4] > 0).all()
    half = forced_experts(Case.of(experts=8, etp=1, routing="equal", skew=0.5), 0, torch.arange(256))
    assert (half.sum(-1) == 2).all() and half.sum(0).tolist() == [128 + 32] * 2 + [32] * 6
    assert sorted(load["one"].sum(0).tolist()) == [0] * 6 + [400] * 2
    skewed = load["skewed"].sum(0)
    assert skewed[0] > 2 * skewed[4:].max() and (skewed > 0).all()
    other = Case.of(experts=8, etp=1, routing="skewed", seed=1)
    assert not torch.equal(load["skewed"], forced_experts(other, 0, tokens)), "another seed"
    assert not torch.equal(load["skewed"], forced_experts(Case.of(experts=8, etp=1, routing="skewed"), 1, tokens)), (
        "a layer"
    )
    with pytest.raises(ValueError, match="routing=learned: leaves the choice to the router"):
        forced_experts(Case.of(experts=8, etp=1), 0, tokens)


def _outcome(words: str) -> dict[str, Tensor]:
    sizes = (
        "layers=2 heads=4 kv_heads=4 hidden=16 ffn=24 vocab=67 seq=16 batch=2 steps=2 lr=0.1 expert_ffn=12 experts=8"
    )
    return outcome(f"{sizes} delivery=local {words}")


def far(found: dict[str, Tensor], must: dict[str, Tensor], *kinds: str) -> float:
    """The largest relative error among tensors of these kinds."""
    names = [name for name in must if name.startswith(kinds)]
    assert names and {*names} <= found.keys()
    return max(float((found[n] - must[n]).abs().max() / must[n].abs().max().clamp(min=1e-9)) for n in names)


def test_balance_losses_weigh_the_same_however_a_batch_is_grouped() -> None:
    """Up to rounding the losses have the factor 1 at every tp, cp, dp and micro (experts.md 21.5)."""
    balanced = "aux_loss=1.0 sequence_loss=0.5 z_loss=0.1"
    alone = _outcome(f"mode=tp tp=1 dp=1 micro=4 {balanced}")
    plain = _outcome("mode=tp tp=1 dp=1 micro=4")
    router = "grad/layers.0.mlp.router.weight"
    assert far({router: plain[router]}, {router: alone[router]}, "grad/") > 0.1, "they count"
    for grouping in ("mode=tp tp=1 cp=2 dp=4 micro=1 ep=4", "mode=msp tp=2 pp=2 dp=2 micro=2 etp=1 ep=4"):
        found = _outcome(f"{grouping} {balanced}")
        assert far(found, alone, "grad/", "param/", "loss/", "grad_norm/") < 1e-10, grouping


def test_a_capacity_of_the_micro_batch_drops_the_same_rows_on_any_ranks() -> None:
    """With a capacity of each rank, the rows that are dropped depend on the ranks that hold them (experts.md 21.3)."""
    capacity, grouping = "capacity=0.7 capacity_of", "mode=tp-sp tp=2 cp=2 dp=2 micro=2 ep=2 etp=1"
    alone = _outcome(f"mode=tp tp=1 dp=1 micro=4 {capacity}=micro-batch")
    assert far(_outcome(f"{grouping} {capacity}=micro-batch"), alone, "grad/", "param/", "loss/") < 1e-10
    assert far(_outcome(f"{grouping} {capacity}=rank"), alone, "grad/") > 1e-3, "other rows are dropped"


def test_a_checkpoint_of_experts_goes_on_at_another_layout(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    whole = _outcome("mode=tp tp=1 steps=4 optimizer=adamw lr=0.01 clip=0.05 micro=2 routing=skewed")
    words = "optimizer=adamw lr=0.01 clip=0.05 routing=skewed"
    _outcome(f"mode=tp-sp tp=2 dp=2 micro=1 ep=4 etp=1 zero=1 save={folder} {words}")
    found = _outcome(f"mode=tp tp=2 cp=2 ep=2 micro=2 load={folder} {words}")
    assert far(found, {name: one for name, one in whole.items() if name.startswith("param/")}, "param/") < 1e-9
