"""Dropout of programs that know nothing of shardproof: masks are recorded, judged, and given to the truth."""

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Split
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import shardproof
from shardproof.parallel.subject import ParallelSubject
from shardproof.suites.subjects import dropout
from tests.harness.proofs import failed, planted_on_ranks, proved, verdict_of
from tests.harness.toy_subjects import Changed


def message(result: Any, check: str) -> str:
    return str(verdict_of(result, check).message)


@pytest.mark.parametrize(("case", "truth"), [("tp=2 dp=3", ""), ("dp=2 tp=2 recompute=true dtype=float32", "alone")])
def test_numbers_are_the_truths_with_the_masks_of_the_ranks(case: str, truth: str) -> None:
    result = proved("shardproof.suites.subjects.dropout:subject", case, truth=truth)
    assert failed(result) == set()
    assert result.evidence is not None and result.evidence.run.mask_draws is not None
    assert len(result.evidence.truth.from_ranks) == 2 * 3 * result.case.axis_sizes["dp"] * 2  # type: ignore[attr-defined]
    assert "the dense model was given them" in message(result, "masks")


def planted(monkeypatch: pytest.MonkeyPatch, case: str, name: str, wrong: object) -> Any:
    return proved(planted_on_ranks(monkeypatch, dropout.subject, dropout, name, wrong), case)


def test_one_seed_for_all_shards_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    result = planted(monkeypatch, "tp=2 dp=2", "stream", lambda rank: nullcontext())
    assert failed(result) == {"masks"}
    assert "which hold different shards, agree in 60 of 60 elements" in message(result, "masks")
    assert "ranks 0, 1 hold different shards over tp and drop by one mask" in message(result, "masks")


def test_seeds_of_their_own_for_a_whole_activation_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = dropout.DropoutMlp

    def network(case: Any, rank: int, *more: Any) -> nn.Module:
        torch.manual_seed(rank)
        return right(case, rank, *more)

    result = planted(monkeypatch, "tp=2 dp=2", "DropoutMlp", network)
    assert "fail" in {verdict.verdict for verdict in result.verdicts if verdict.check == "replicas"}
    assert {verdict.verdict for verdict in result.verdicts if verdict.check in ("forward", "coverage")} == {"unknown"}
    assert "mask/0/dropout.py" in message(result, "replicas")
    assert "ranks 0, 1 hold the same tensor and drop by independent masks" in message(result, "replicas")


def test_recomputation_that_draws_anew_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = partial(checkpoint, preserve_rng_state=False)
    result = planted(monkeypatch, "tp=2 recompute=true", "checkpoint", wrong)
    assert {"masks", "parameter_gradients"} <= failed(result)
    assert "backward drops by another mask than forward at " in message(result, "masks")
    assert "causes: recomputation drew masks that its forward did not draw" in message(result, "masks")
    assert {cause.id for one in result.diagnoses.values() if one for cause in one.causes} == {"other_numbers"}


def test_a_rate_of_its_own_on_the_ranks_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The masks fit their rate, and the scale of what is kept is wrong."""
    right = dropout.DropoutMlp

    def network(case: Any, *more: Any) -> nn.Module:
        return right(case.but(dropout=0.1), *more)

    assert "forward" in failed(planted(monkeypatch, "tp=2", "DropoutMlp", network))


class Attention(nn.Module):
    """Every way in which torch drops on a CPU, and modules of torch around it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.drop = nn.Linear(8, 24), nn.Linear(8, 8), nn.Dropout1d(0.2)

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, seq, 8]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True)
        return self.drop(nn.functional.dropout(self.out(y.transpose(1, 2).flatten(2)), 0.3))  # type: ignore[no-any-return]


class Wrapped:
    """A step of Attention under torch's DistributedDataParallel or FSDP2, its own truth."""

    truth = "alone"
    words: Mapping[str, Any] = {"micro": 2, "steps": 1}

    def __init__(self, wrap: Any) -> None:
        self.wrap = wrap

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Any]:
        torch.manual_seed(case.seed)
        model = Attention().double().to(getattr(torch, case.dtype))
        parallel = self.wrap(model)
        torch.manual_seed(7 + dist.get_rank())
        total = torch.zeros((), dtype=getattr(torch, case.dtype))
        for micro in range(case.micro):
            first = case.samples(0, micro, case.axis_rank("dp", dist.get_rank()), 3).start
            x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(first)).to(total.dtype)
            loss = parallel(x).square().mean() / case.micro
            loss.backward()
            total += loss.detach() / case.dp
        dist.all_reduce(total)
        return {"loss/0": total, **{f"grad/{name}": weight.grad for name, weight in model.named_parameters()}}


@pytest.mark.parametrize("wrap", [DistributedDataParallel, fsdp.fully_shard])
def test_unmodified_data_parallel_programs(wrap: Any) -> None:
    result = proved(Wrapped(wrap), "dp=3")
    assert failed(result) == set()
    assert result.evidence is not None and len(result.evidence.truth.from_ranks) == 3 * 2 * 3


class OfDTensors:
    """A product whose factor is split by its columns, dropped by torch: what is held is a DTensor."""

    cases = ("tp=2",)
    words: Mapping[str, Any] = {"steps": 1, "split": True}

    def __init__(self, seeds: tuple[int, int]) -> None:
        self.seeds = seeds

    def computed(self, case: Any, mesh: Any) -> Mapping[str, Any]:
        """The outcome, of DTensors on a mesh."""
        outcome = {"loss/0": torch.zeros((), dtype=getattr(torch, case.dtype))}
        for micro in range(case.micro):
            x: Tensor = torch.randn(6, 20, generator=torch.Generator().manual_seed(micro)).to(outcome["loss/0"].dtype)
            if mesh is not None:
                x = distribute_tensor(x, mesh, [Split(1) if case.split else Replicate()], src_data_rank=None)
            y = nn.functional.dropout(x, 0.4).square().sum()
            outcome["loss/0"] += y.full_tensor() if isinstance(y, DTensor) else y
        return outcome

    def truth(self, case: Any, device: torch.device) -> Mapping[str, Any]:
        return self.computed(case, None)

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Any]:
        torch.manual_seed(self.seeds[dist.get_rank()])
        return self.computed(case, dist.init_device_mesh("cpu", (case.tp,)))


@pytest.mark.filterwarnings("ignore:DTensor random operators")
def test_dtensors_say_themselves_where_their_masks_lie() -> None:
    """On CPUs torch seeds no shard of a DTensor by itself: equal seeds are equal masks."""
    assert failed(proved(OfDTensors((1, 2)), "tp=2 micro=3")) == set()
    assert failed(proved(OfDTensors((1, 1)), "tp=2 micro=3", explain=False)) == {"masks"}
    for seed, nothing in ((1, set()), (2, {"replicas"})):
        assert failed(proved(OfDTensors((1, seed)), "tp=2 split=false", explain=False)) & {"replicas"} == nothing


class OfItsOwn:
    """Draws a mask without torch's dropout and returns it; the truth takes it as given."""

    cases = ("tp=2",)
    words: Mapping[str, Any] = {"steps": 1, "micro": 1, "factor": 1.0}

    def truth(self, case: Any, device: torch.device, given: Mapping[str, Tensor] | None = None) -> Mapping[str, Tensor]:
        mask = torch.ones(6, 20) if given is None else given["mask/0/hidden"]
        return {"output/0": torch.arange(120, dtype=torch.float64).view(6, 20) * mask}

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Any]:
        rank, columns = dist.get_rank(), 20 // case.tp
        dist.all_reduce(torch.ones(1))
        mask = torch.rand(6, columns, generator=torch.Generator().manual_seed(rank)) >= 0.5
        numbers = torch.arange(120, dtype=torch.float64).view(6, 20)[:, rank * columns :][:, :columns]
        place = (0, rank * columns), (6, 20)
        dropped = numbers * mask * case.factor
        weight = torch.randn(60, generator=torch.Generator().manual_seed(7)) * case.factor
        found = {"output/0": shardproof.Shard(dropped, *place), "mask/0/hidden": shardproof.Shard(mask, *place)}
        return {**found, "init/weight": weight}

    def deviations(self, case: Any) -> Mapping[str, float]:
        return {"weight": 1.0}


def test_a_truth_takes_returned_masks_as_given() -> None:
    assert failed(proved(OfItsOwn(), "tp=2")) == set()
    assert failed(proved(OfItsOwn(), "tp=2 factor=2.0", explain=False)) == {"forward", "initial_values"}


@pytest.mark.filterwarnings("ignore:DTensor random operators")
def test_masks_that_are_not_those_of_the_truth_are_unknown() -> None:
    def truth(case: Any, device: torch.device) -> Mapping[str, Any]:
        nn.functional.dropout(torch.ones(3), 0.5)  # once more than the ranks
        return drops_twice.truth(case, device)

    drops_twice = OfDTensors((1, 2))
    result = proved(Changed(drops_twice, truth=truth), "tp=2")
    assert {verdict.verdict for verdict in result.verdicts if verdict.check in ("masks", "coverage")} == {"unknown"}
    assert "the truth draws 3 masks and the ranks 2, in 1 steps of 2 micro-batches" in message(result, "masks")
    assert "forward" not in {verdict.check for verdict in result.verdicts if verdict.verdict == "pass"}


class GivesWeights:
    """A weight that the ranks draw, and a truth that is given it, if they return it."""

    def __init__(self, *, returns: bool) -> None:
        self.returns = returns

    def __call__(self, _case: Any, _device: torch.device) -> dict[str, Tensor]:
        weight = torch.arange(3.0) + 1
        dist.all_reduce(loss := weight.sum() / 2)
        return {"loss/0": loss, **({"init/weight": weight} if self.returns else {})}

    def truth(self, _case: Any, _device: torch.device, given: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        return {"loss/0": (given or {})["init/weight"].sum()}


def test_what_a_truth_is_given_and_no_rank_returns_is_a_failure_and_no_reason_to_skip() -> None:
    assert failed(proved(GivesWeights(returns=True), "tp=2")) == set()
    result = proved(GivesWeights(returns=False), "tp=2")
    assert verdict_of(result, "merge").verdict == "fail"
    assert "init/weight: the truth takes it from the ranks, and no rank returned it" in message(result, "merge")


def test_a_mask_of_our_decoder_that_no_rank_returns_fails_in_its_module() -> None:
    class Forgets(ParallelSubject):
        def __call__(self, case: Any, device: torch.device) -> Any:
            outcome = super().__call__(case, device)
            return {name: tensor for name, tensor in outcome.items() if name != "mask/0/layers.0.mlp"}

    result = proved(Forgets(), "tp=2 layers=1 seq=16 dropout=0.25 random=stateful")
    assert verdict_of(result, "merge").verdict == "fail"
    first = result.diagnoses["merge"].first
    assert (first.phase, first.region) == ("forward", "layers.0.mlp")
