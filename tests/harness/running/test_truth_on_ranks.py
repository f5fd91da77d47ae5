"""A truth that is a subject: it runs on ranks in a case of its own, and its merged outcome is what is compared."""

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardproof
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.errors import RequestError
from shardproof.harness.subject import OnRanks, case_of, compared_with, refusal, resolve_subject, truth_of
from tests.harness.proofs import contradicted, failed, proved, verdict_of

HERE = "tests.harness.running.test_truth_on_ranks"
ROWS, WIDTH, LABELS = 2, 6, 3


def weight_of(case: Any) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(case.seed)
    return torch.randn(WIDTH, LABELS, generator=drawn, dtype=torch.float64).to(getattr(torch, case.dtype))


def by_rows(case: Any, device: torch.device) -> dict[str, Any]:
    """A linear layer whose rows are split over tp, and samples over dp."""
    mesh = dist.init_device_mesh("cpu", (case.dp, case.tp), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh.get_coordinate() or (0, 0)
    weight = weight_of(case).chunk(case.tp)[tp].clone().requires_grad_()
    total = torch.zeros((), dtype=weight.dtype)
    for micro in range(case.micro):
        for number in case.samples(0, micro, dp, ROWS):
            x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
            y = x.to(weight.dtype).chunk(case.tp)[tp] @ weight
            whole = y.detach().clone()
            dist.all_reduce(whole, group=mesh.get_group("tp"))
            (y * whole).sum().backward()  # the gradient of half of its square
            total += whole.square().sum() / 2
    for tensor in (total, weight.grad):
        dist.all_reduce(tensor, group=mesh.get_group("dp"))
    with torch.no_grad():
        gradient = weight.grad
        assert gradient is not None
        after = weight - 0.1 * gradient
    places = {"grad/w": gradient, "param/w": after}
    shards = {name: shardproof.Shard(x, (tp * len(x), 0), (WIDTH, LABELS)) for name, x in places.items()}
    return {"loss/0": total * getattr(case, "scale", 1), **shards}


by_rows.words, by_rows.truth, by_rows.cases = {"steps": (1,), "scale": 1}, "alone", ("tp=2",)  # type: ignore[attr-defined]
by_rows.refuses = lambda case: "tp divides 6" if WIDTH % case.tp else ""  # type: ignore[attr-defined]


def by_hand(case: Any, device: torch.device) -> dict[str, Any]:
    """A program of other words, that of `by_rows` but for the loss of `factor`."""
    return {**by_rows(case, device), "loss/0": by_rows(case, device)["loss/0"] * case.factor}


by_hand.words, by_hand.cases = {"steps": (1,), "factor": 1}, ("dp=2",)  # type: ignore[attr-defined]
by_hand.truth = f"{HERE}:by_rows tp=3 dp={{tp}}"  # type: ignore[attr-defined]


@pytest.mark.parametrize("case", ["tp=2 dp=3", "tp=2 dp=4 micro=1 dtype=float32", "tp=2 dp=3 dtype=bfloat16 seed=3"])
def test_two_programs_in_other_layouts_agree_where_both_are_right(engine: InprocEngine, case: str) -> None:
    result = proved(by_hand, case, engine)
    assert failed(result) == set()
    assert torch.backends.cuda.flash_sdp_enabled(), "kernels that control runs choose on all ranks are so no longer"
    assert result.evidence is not None
    known = result.evidence.truth.initial  # of the parts that the ranks of the truth hold
    assert torch.equal(known["w"], weight_of(case_of(case, resolve_subject(by_hand)).but(dtype="float64")))


def test_a_program_unlike_the_other_fails_in_what_they_share(engine: InprocEngine) -> None:
    assert contradicted(proved(by_hand, "tp=2 dp=3 factor=2", engine, explain=False)) == {"forward"}
    result = proved(by_hand, "tp=2 dp=3", engine, truth=f"{HERE}:by_rows tp=3 scale=2")
    assert contradicted(result) == {"forward"}, "words behind the name are those of its case"


def test_the_case_of_a_truth_has_the_words_of_both_and_the_same_global_batch() -> None:
    given = resolve_subject(by_hand)
    truth = truth_of(given)
    assert (
        isinstance(truth, OnRanks)
        and compared_with(truth) == f"the subject {HERE}:by_rows on tp=3 dp={{tp}}, in float64"
    )
    assert str(truth.case_of(case_of("tp=2 dp=3 micro=4 seed=7", given))) == "tp=3 dp=2 micro=6 seed=7"
    itself = truth_of(resolve_subject(by_rows, f"{HERE}:by_rows"))
    assert isinstance(itself, OnRanks) and str(itself.case_of(case_of("tp=2 dp=3", given))) == "micro=6"


@pytest.mark.parametrize(
    ("truth", "case", "rule"),
    [
        (
            "by_rows tp={tq}",
            "tp=2",
            "its truth .*by_rows has no case 'tp={tq}' (the case has no word 'tq'); legal: other",
        ),
        (
            "by_rows tp={tp.real}",
            "tp=2",
            "has no case 'tp={tp.real}' (tp={tp.real}: must be a whole number; legal: tp=1)",
        ),
        ("by_rows wide=1", "tp=2", "(wide=1: is no word of this subject's cases; legal: tp cp dp pp"),
        ("weight_of tp=2", "tp=2", "has no attribute words, so it is a dense model, which runs in one process"),
        ("parting tp=2", "tp=2", "the ranks of the truth .*parting do not make one loss/0: rank 1 differs from rank 0"),
    ],
)
def test_a_truth_that_cannot_be_run_says_what_it_needs(truth: str, case: str, rule: str, engine: InprocEngine) -> None:
    with pytest.raises(RequestError, match=re.escape(rule).replace(r"\.\*", ".*")):
        proved(by_hand, case, engine, truth=f"{HERE}:{truth}")


def test_a_case_that_the_truth_cannot_have_is_none_of_the_subjects() -> None:
    given = resolve_subject(by_hand, f"{HERE}:by_rows tp=5")
    told = f"its truth {HERE}:by_rows refuses 'tp=5': tp divides 6"
    assert refusal(case_of("tp=2", given), given) == told
    given = resolve_subject(by_hand, f"{HERE}:by_rows dp=4")
    told = f"dp=4 of its truth {HERE}:by_rows must divide the 6 micro-batches of a step"
    assert refusal(case_of("tp=2 dp=3", given), given) == told
    assert not refusal(case_of("tp=2 dp=2", given), given)


def parting(case: Any, device: torch.device) -> dict[str, Any]:
    return {"loss/0": torch.tensor(1.0 + dist.get_rank())}


parting.words = {"steps": (1,)}  # type: ignore[attr-defined]


def routed(case: Any, device: Any, routing: Mapping[str, torch.Tensor] | None = None) -> dict[str, Any]:
    """Each token goes to the expert of the larger score, both nearly equal: rounding decides."""
    dtype = getattr(torch, case.dtype)
    tokens = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(case.seed), dtype=torch.float64).to(dtype)
    scores = torch.stack([tokens.sum(-1), tokens.flip(-1).sum(-1) + case.off], -1)  # equal but for the order of sums
    chosen = scores.argmax(-1)
    if routing is not None:
        chosen = routing["routing/0/mlp"].double().argmax(-1)
    out = torch.stack([tokens * 2, tokens * -3], 1)[torch.arange(8), chosen]
    return {
        "loss/0": out.sum(),
        "metric/0/score": scores.sum(),
        "routing/0/mlp": torch.eye(2, dtype=torch.bool)[chosen],
    }


def test_a_truth_may_force_the_experts_that_ranks_chose_and_the_verdict_says_so(engine: InprocEngine) -> None:
    def subject(case: Any, device: torch.device) -> dict[str, Any]:
        dist.all_reduce(torch.ones(()))
        return routed(case, device)

    subject.words = {"steps": (1,), "off": 0.0}  # type: ignore[attr-defined]
    subject.truth = lambda case, device: routed(case.but(off=1e-3), device)  # type: ignore[attr-defined]
    alone = proved(subject, "tp=2", engine, explain=False)
    assert "routing" in contradicted(alone), "without it a near tie is another model"
    subject.truth = lambda case, device, routing: routed(case.but(off=1e-13), device, routing)  # type: ignore[attr-defined]
    result = proved(subject, "tp=2", engine)
    assert failed(result) == set()
    assert "choices themselves: the truth takes those of the ranks" in str(verdict_of(result, "routing").notes)
