"""Laws of a subject with a truth of its own. Regrouping: a loss that is averaged wrongly is named by its factor. Truth:
a dense model that is another one in float32 than in float64 fails as that; rounding, large or odd, does not.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardproof.bugs.planting import plant_subject
from shardproof.harness.checking.checks import LAWS
from shardproof.harness.dense_model import read_case
from shardproof.harness.running.trials.law_runs import groupings
from shardproof.harness.subject import case_of, resolve_subject
from shardproof.parallel.subject import subject as decoder
from shardproof.suites.mutants.catalogue import MUTANTS, of_file
from tests.harness import own_words
from tests.harness.noted import names_of, reasons_of
from tests.harness.own_words import Network, trained
from tests.harness.proofs import proved

Loss = Callable[[Any, Tensor, Tensor], Tensor]


class Averaged:
    """A subject whose loss is a mean (`mean`) over valid samples, whose numbers differ by data rank."""

    words, cases, truth = {"micro": 2}, ("dp=3",), "alone"

    def __init__(self, mean: Loss) -> None:
        self.mean = mean

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Any]:
        batches = [case.samples(0, micro, dist.get_rank(), 5) for micro in range(case.micro)]
        numbers = torch.tensor([n for batch in batches for n in batch], dtype=torch.float64)
        valid = (numbers % 7 < 1 + numbers % 4).double()
        return {"loss/0": self.mean(case, (numbers.sqrt() * valid).sum(), valid.sum())}


def summed(x: Tensor) -> Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x


def law(subject: Any, text: str) -> Any:
    (verdict,) = proved(subject, text, checks={"regrouping": LAWS["regrouping"]}).verdicts
    return verdict


def test_a_mean_over_all_valid_samples_keeps_the_law() -> None:
    verdict = law(Averaged(lambda case, loss, count: summed(loss) / summed(count)), "dp=3")
    assert (verdict.verdict, verdict.message) == ("pass", "the same step as with dp=1 micro=6, dp=6 micro=1")


@pytest.mark.parametrize(
    ("mean", "said"),
    [
        (lambda case, loss, count: summed(loss / count) / case.dp, "(no ratio of sizes: a mean of means"),
        (lambda case, loss, count: summed(loss) / summed(count) * case.dp, "(the factor grows with dp)"),
        (lambda case, loss, count: summed(loss) / summed(count) / case.dp, "(the factor grows with micro)"),
    ],
)
def test_a_loss_that_is_averaged_wrongly_breaks_it(mean: Loss, said: str) -> None:
    verdict = law(Averaged(mean), "dp=3")
    assert verdict.verdict == "fail" and said in verdict.message
    assert "with dp=1 micro=6 loss/0 is " in verdict.message and len(verdict.message.splitlines()) == 6


def spread(x: Tensor, add: Callable[[Tensor], Tensor]) -> Tensor:
    """A function of all samples of a micro-batch on all ranks together, as batch norm is."""
    count = add(torch.tensor(float(len(x)), dtype=x.dtype))
    return add((x - add(x.sum()) / count).square().sum()).sqrt()


class WithTruth:
    """A subject whose loss is a sum over micro-batches times a factor, as in its own dense model."""

    words, cases = {"micro": 2}, ("dp=2",)

    def __init__(self, of_batch: Any, factor: Callable[[Any], float], true_factor: Callable[[Any], float]) -> None:
        self.of_batch, self.factor, self.true_factor = of_batch, factor, true_factor

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Any]:
        return self.loss(case, [dist.get_rank()], summed, self.factor)

    def truth(self, case: Any, device: torch.device) -> Mapping[str, Any]:
        return self.loss(case, range(case.dp), torch.clone, self.true_factor)

    def loss(self, case: Any, ranks: Any, add: Any, factor: Callable[[Any], float]) -> Mapping[str, Any]:
        total = torch.zeros((), dtype=torch.float64)
        for micro in range(case.micro):
            numbers = [number for rank in ranks for number in case.samples(0, micro, rank, 5)]
            total += self.of_batch(torch.tensor(numbers, dtype=torch.float64), add)
        return {"loss/0": total * factor(case)}


@pytest.mark.parametrize(
    ("of_batch", "factor", "true_factor", "found"),
    [
        (spread, lambda case: 1.0, lambda case: 1.0, ("unknown", "so is the dense model's")),
        (spread, lambda case: 1.0, lambda case: 1.0 + case.dp, ("fail", "no ratio of sizes")),
        (lambda x, add: add(x.sum()), lambda case: case.micro, lambda case: case.micro, ("fail", "grows with micro")),
    ],
)
def test_a_model_of_whole_micro_batches_breaks_no_law(
    of_batch: Any, factor: Callable[[Any], float], true_factor: Callable[[Any], float], found: tuple[str, str]
) -> None:
    """A factor that depends on sizes is wrong even if the truth has it too."""
    verdict = law(WithTruth(of_batch, factor, true_factor), "dp=2")
    assert verdict.verdict == found[0] and found[1] in verdict.message, verdict.message


class WithGradient(WithTruth):
    """The same beside a gradient that is multiplied by the number of data ranks."""

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Any]:
        return {**super().__call__(case, device), "grad/w": torch.arange(9.0, dtype=torch.float64) * case.dp}

    def truth(self, case: Any, device: torch.device) -> Mapping[str, Any]:
        return {**super().truth(case, device), "grad/w": torch.arange(9.0, dtype=torch.float64)}


def test_what_the_dense_model_changes_too_is_no_breach_beside_a_tensor_that_it_does_not_change() -> None:
    verdict = law(WithGradient(spread, lambda case: 1.0, lambda case: 1.0), "dp=2")
    assert verdict.verdict == "fail" and "first:  backward in step 0: grad/w" in verdict.message, verdict.message


def test_what_rounding_leaves_of_a_gradient_of_zero_keeps_it() -> None:
    """A softmax does not see the bias of a norm of keys: its gradient is rounding in every grouping."""
    words = "hidden=8 heads=2 ffn=6 vocab=389 tied=false qk_norm=true fuse_qkv=false seq=8 micro=3 steps=1 lr=0.1"
    verdict = law(decoder, f"mode=mtp activation=swiglu fuse_mlp=true {words}")
    assert (verdict.verdict, verdict.message) == ("pass", "the same step as with dp=3 micro=1, dp=1 micro=3 cp=2 pp=2")


SPREAD = "tp=2 dp=2 micro=2 steps=1 seq=8 hidden=16 heads=2 kv_heads=2 ffn=8 vocab=257"


KNOWN = {bug.name: bug for bug in (*MUTANTS, *of_file("tests/regrouping"))}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("context-gradients-over-data-ranks-alone", "(replica conflict), which is whole with dp=2"),
        ("divided-by-stages", "the factor falls as cp or pp grows"),
    ],
)
def test_a_factor_of_context_ranks_or_stages_breaks_it(name: str, said: str) -> None:
    """A global batch over dp x cp x micro x pp on 8 ranks."""
    one_layer = read_case("mode=tp-sp tp=2 dp=3 micro=2 steps=1 layers=1")  # is no two stages
    assert [sizes.get("cp", 1) for sizes, _ in groupings(one_layer, resolve_subject(decoder))] == [1, 2]
    case = read_case(SPREAD)
    spread = {"dp": 1, "micro": 4, "cp": 2, "pp": 2}
    assert [sizes for sizes, _ in groupings(case, resolve_subject(decoder))] == [{"dp": 1, "micro": 4}, spread]
    verdict = law(plant_subject(KNOWN[name].sources()), SPREAD)
    assert verdict.verdict == "fail" and said in verdict.message and "micro=4 cp=2 pp=2" in verdict.message


class Low(Averaged):
    """The same in float32, whose sums depend on their order; it refuses float64."""

    words: Any = {"micro": 2, "dtype": "float32"}

    def refuses(self, case: Any) -> str:
        return "adds in float32" if case.dtype == "float64" else ""

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Any]:
        """Square roots of irregular numbers, added batch by batch."""
        loss, count = torch.zeros(()), torch.zeros(())
        for micro in range(case.micro):
            numbers = torch.tensor(list(case.samples(0, micro, dist.get_rank(), 5)), dtype=torch.float32)
            loss += (0.1 + numbers).sqrt().sum()
            count += 5
        return {"loss/0": self.mean(case, loss, count).reshape(())}


@pytest.mark.parametrize(
    ("factor", "said"), [(lambda case: 1.0, ""), (lambda case: 1 + 1e-5 * case.dp, "(no ratio of sizes")]
)
def test_subject_without_float64_is_held_to_limits_of_its_own_dtype(factor: Callable[[Any], float], said: str) -> None:
    verdict = law(Low(lambda case, loss, count: summed(loss) / summed(count) * factor(case)), "dp=3")
    assert verdict.verdict == ("fail" if said else "pass") and said in verdict.message, verdict.message


def test_a_grouping_that_the_subject_does_not_finish_is_reported_and_is_no_failure() -> None:
    def three_at_most(case: Any, loss: Tensor, count: Tensor) -> Tensor:
        if case.dp > 3:
            raise RuntimeError("the mesh has 3 ranks")
        return summed(loss) / summed(count)

    verdict = law(Averaged(three_at_most), "dp=3")
    assert (verdict.verdict, verdict.message) == ("pass", "the same step as with dp=1 micro=6")
    (reason,) = reasons_of(verdict)
    assert names_of(verdict) == ["dp=6 micro=1"]
    assert reason.startswith("rank 0 of 6 raised RuntimeError: the mesh has 3 ranks")


def test_a_subject_whose_own_cases_have_no_data_ranks_is_not_run_on_several() -> None:
    given = resolve_subject(own_words.subject)
    assert groupings(case_of("tp=2", given), given)
    split = Averaged(lambda case, loss, count: loss)
    split.cases = ("tp=3",)
    assert groupings(case_of("tp=3", resolve_subject(split)), resolve_subject(split)) == []


class Drawn(Network):
    """Draws weights in the case's dtype in part: in another than float64 its loss is off by about this share."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def weights(self, case: Any) -> tuple[Tensor, Tensor]:
        w1, w2 = own_words.weights(case)
        return (w1, w2) if case.dtype == "float64" else (w1 * (1 + self.share / 4), w2 * (1 + self.share / 4))

    def truth(self, case: Any, device: torch.device) -> Mapping[str, Tensor]:
        return trained(case, *self.weights(case))


def told(subject: Network, case: str, truth: str = "") -> dict[str, Any]:
    result = proved(subject, case, truth=truth)
    first = result.diagnosis
    assert first is None or first.check != "truth" or [cause.id for cause in first.causes] == ["stated"]
    return {verdict.check: verdict for verdict in result.verdicts if verdict.verdict != "pass"}


@pytest.mark.parametrize(
    ("share", "dtype", "truth"), [(1e-2, "bfloat16", ""), (1e-4, "bfloat16", "alone"), (1e-4, "float32", "")]
)
def test_another_function_in_float32_fails_with_that_as_its_cause(share: float, dtype: str, truth: str) -> None:
    failed = told(Drawn(share), f"tp=2 act=tanh dtype={dtype} micro=1 steps=1", truth)
    assert "truth" in failed and failed["truth"].verdict == "fail"
    what, _, error, _, causes, _ = failed["truth"].message.splitlines()
    assert "the dense model computes another function in float32 than in float64" in what
    assert "rounding to float32 explains" in error and "draw its numbers in float64 and round them" in causes
    assert 0.2 * share < failed["truth"].worst.error < 5 * share
    assert told(Drawn(share), "tp=2", truth) == {}, "one model in float64 alone"


@pytest.mark.parametrize("case", ["tp=2 dp=3", "tp=2 width=96 dtype=float32", "tp=2 act=tanh dtype=float16"])
def test_a_dense_model_that_rounds_what_it_drew_is_one_function(case: str) -> None:
    result = proved(Network(), case)
    verdicts = {verdict.check: verdict.verdict for verdict in result.verdicts}
    assert verdicts.get("truth") == (None if "dtype" not in case else "pass")


class Cancelling(Network):
    """Its loss is what is left of two large numbers: rounding is amplified, in whatever order sums are taken."""

    def truth(self, case: Any, device: torch.device) -> Mapping[str, Tensor]:
        w1, w2 = own_words.weights(case)
        x = own_words.samples(case, 0, 0, 0)
        y = (x @ w1.T) @ w2.T
        return {"output/0": (y + 1e4 * (x @ w1.T).sum()) - 1e4 * (x @ w1.T).sum(), **trained(case, w1, w2)}

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Any]:
        return {**super().__call__(case, device), "output/0": self.truth(case, device)["output/0"]}


class Choosing(Cancelling):
    """A router's choice that falls otherwise in float32 for one row of many."""

    def truth(self, case: Any, device: torch.device) -> Mapping[str, Tensor]:
        x = own_words.samples(case, 0, 0, 0)
        chosen = torch.arange(len(x)) % 2 == 0
        chosen[3] = case.dtype == "float64"
        w1, w2 = own_words.weights(case)
        return {"output/0": torch.where(chosen[:, None], x, -2 * x), **trained(case, w1, w2)}


@pytest.mark.parametrize("subject", [Cancelling(), Choosing()])
def test_amplified_rounding_and_a_choice_that_falls_otherwise_are_no_other_function(subject: Network) -> None:
    assert "truth" not in told(subject, "tp=2 act=tanh dtype=float32 micro=1 steps=1")


def test_no_grouping_is_the_same_where_the_mathematics_depends_on_who_holds_what() -> None:
    """Which rows an expert drops of each rank's tokens, and a loss over the micro-batches of all data ranks at once."""
    given, text = resolve_subject(decoder), "tp=2 dp=2 micro=2 experts=8"
    words = ("capacity=0.5 capacity_of=micro-batch", "capacity=0.5", "routing=skewed global_loss=0.1")
    assert [bool(groupings(case_of(f"{text} {more}", given), given)) for more in words] == [True, False, False]
