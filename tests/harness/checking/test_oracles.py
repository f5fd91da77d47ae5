"""Every check can fail: it does if what it is held against is wrong, or on wrong evidence if that is nothing.

The exact tests of dropout masks are valid, and each finds what it is there for.
"""

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from math import comb
from typing import Any

import pytest
import torch
from torch import Tensor

from shardproof.harness.checking.checks import CHECKS, run_checks
from shardproof.harness.checking.finding import Finding
from shardproof.harness.checking.mask_checks import binomial, check_masks, hypergeometric
from shardproof.harness.checking.measures.kinds import kind_of
from shardproof.harness.checking.records import DocumentLeak, Documents, Evidence, Repeats
from shardproof.harness.diagnosing.diagnosis import explanation_of
from shardproof.harness.engines.engine import Unwaited
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.outcome.blocks import localize
from shardproof.harness.protocols import Shard
from shardproof.harness.running.proof import prove
from shardproof.harness.running.trials.trial import decoder
from shardproof.harness.verdicts.verdict import FAIL, PASS, UNKNOWN
from shardproof.reference.case import Case
from shardproof.reference.training import truth as dense
from tests.harness.noted import reasons_of
from tests.harness.toy_evidence import TERMS, but, case, evidence, named, outcome_of, planted, truth


def right_ranks() -> tuple[dict[str, object], ...]:
    return tuple(outcome_of(rank, truth()) for rank in range(2))


def _nudged(tensor: Tensor) -> Tensor:
    return ~tensor if tensor.dtype == torch.bool else tensor + (1e-6 if tensor.is_floating_point() else 1)


def repeated(*runs: dict[str, Tensor]) -> Evidence:
    seen = evidence()
    outcomes = tuple([localize(outcome_of(rank, run)) for rank in range(2)] for run in runs)
    return replace(seen, repeats=Repeats(runs=outcomes))


def torn() -> Evidence:
    first, second = right_ranks()
    return evidence(first, {**second, "loss/0": truth()["loss/0"] + 1e-15})


PARAM = next(name for name in truth() if name.startswith("param/"))
SAVED = f"saved/{PARAM}"


def saved_as(change: Callable[[Tensor], Tensor]) -> tuple[dict[str, Any], ...]:
    """Right ranks, the first of which has saved one parameter so."""
    first, *others = right_ranks()
    whole = change(truth()[PARAM])
    return ({**first, SAVED: Shard(whole, (0,) * whole.dim(), tuple(whole.shape))}, *others)


NUDGED = {**truth(), "loss/0": truth()["loss/0"] + 1e-15}
CHOICE, CHOSEN = "routing/0/layers.0.mlp", torch.tensor([True, False, True])
PROMISED = tuple(replace(term, hidden=True) for term in TERMS)
LEAK = DocumentLeak(phase="forward", of=3, other=4, rank=1, call=1, token=0, gap=0.5, place="model.py:9")
WRONG: dict[str, Callable[[], Evidence]] = {
    "coverage": lambda: evidence(*right_ranks(), truth={f"other/{name}": x for name, x in truth().items()}),
    "merge": lambda: evidence(*right_ranks(), truth={**truth(), "logits/0": torch.zeros(4, 3, 13)}),
    "replicas": torn,
    "routing": lambda: planted({CHOICE: ~CHOSEN}, truth={**truth(), CHOICE: CHOSEN}),
    "saved": lambda: evidence(*saved_as(_nudged), truth={**truth(), SAVED: truth()[PARAM]}),
    "ledger": lambda: evidence(expectation=TERMS[:-1]),
    "groups": lambda: evidence(orders={"tp": ((0,), (1,))}),
    "overlap": lambda: evidence(expectation=PROMISED, hidden=frozenset()),
    "documents": lambda: replace(evidence(), documents=Documents(count=2, leak=LEAK)),
    "waits": lambda: evidence(unwaited=(Unwaited(rank=0, op="all_gather", number=0, group="tp", caller="m.py:1"),)),
    "parallelism": lambda: evidence(events=(), expectation=None),
    "determinism": lambda: repeated(NUDGED),
    "recording": lambda: repeated(NUDGED, NUDGED),
}
"""Check -> evidence in which nothing but what this check is held against is wrong."""


@pytest.mark.parametrize("check", WRONG)
def test_a_check_that_is_handed_a_wrong_reference_fails_and_no_other(check: str) -> None:
    """`coverage` leaves nothing to compare, and a ledger without events fails `parallelism` alone already."""
    failed = named(run_checks(WRONG[check]()), FAIL)
    assert failed == {check} or (check in failed and check in {"coverage", "parallelism"})


def test_a_right_save_passes_and_one_of_another_shape_does_not() -> None:
    right = {**truth(), SAVED: truth()[PARAM]}
    assert run_checks(evidence(*saved_as(torch.clone), truth=right))["saved"].verdict == PASS
    kept = run_checks(evidence(*saved_as(lambda whole: torch.cat([whole, whole[:1]])), truth=right))
    assert named(kept, FAIL) == {"merge"}


def test_files_of_a_checkpoint_that_lack_what_the_ranks_hold_fail() -> None:
    bias, steps = "saved/param/layers.0.mlp.w2.bias", "saved/steps"
    right = {**truth(), SAVED: truth()[PARAM], bias: truth()[bias.partition("/")[2]], steps: torch.tensor(2)}
    seen = evidence(*saved_as(torch.clone), truth=right)
    found = run_checks(seen)
    assert named(found, FAIL) == {"saved"} and found["saved"].names == (bias,)
    assert explanation_of(seen, found).first.phase == "checkpoint"
    assert not named(run_checks(but(seen, declared=("saved/*",))), FAIL), "left out on purpose"
    assert not named(run_checks(evidence(*right_ranks(), truth=right)), FAIL), "a subject that reads no files"


OF_KIND = {"init": "initial_values", "mask": "masks", "tokens": "tokens", "loss": "forward", "logits": "forward"}
OF_KIND |= {"act": "activations", "act_grad": "activation_gradients"}
OF_KIND |= {"grad": "parameter_gradients", "grad_norm": "gradient_norm", "param": "update"}
"""Kind of a tensor -> the check that compares it."""


def test_every_tensor_of_a_wrong_truth_fails_the_check_of_its_kind_alone() -> None:
    assert {*OF_KIND.values(), *WRONG} == set(CHECKS)
    for name, tensor in truth().items():
        other = {**truth(), name: _nudged(tensor)}
        assert named(run_checks(evidence(*right_ranks(), truth=other)), FAIL) == {OF_KIND[kind_of(name)]}, name


def other_truth(case: Case, device: torch.device) -> dict[str, Tensor]:
    """The truth of another seed: right in form, wrong in every number."""
    return dense.truth(case.but(seed=case.seed + 1), device)


def test_a_proof_against_another_model_fails_in_every_number(engine: InprocEngine) -> None:
    """No number is compared with itself (TransformerEngine's parallel loss test did)."""
    case = Case.parse("mode=tp tp=2 layers=1 hidden=16 heads=4 ffn=16 seq=8 vocab=264 micro=1")
    wrong = replace(decoder(), truth=other_truth)
    result = prove(case, "shardproof.parallel.subject:subject", engine, reference=wrong, explain=False)
    of = {told: {verdict.check for verdict in result.verdicts if verdict.verdict == told} for told in (FAIL, PASS)}
    numbers = {"forward", "activations", "activation_gradients", "parameter_gradients", "gradient_norm", "update"}
    assert of[FAIL] == numbers and {"ledger", "merge", "replicas", "determinism"} <= of[PASS]


CASE = case("mode=tp-sp tp=2 seq=16 dropout=0.25 random=stateful")


def two_sided(terms: dict[int, Fraction]) -> dict[int, float]:
    below = {k: sum(terms[j] for j in terms if j <= k) for k in terms}
    above = {k: sum(terms[j] for j in terms if j >= k) for k in terms}
    return {k: float(min(Fraction(1), 2 * min(below[k], above[k]))) for k in terms}


def exact_and_valid(terms: dict[int, Fraction], found: dict[int, float]) -> None:
    assert found == pytest.approx(two_sided(terms), rel=1e-9)
    assert all(sum(float(terms[k]) for k in terms if found[k] <= limit) <= limit for limit in (0.5, 0.1, 1e-3, 1e-9))


def test_probabilities_of_counts_and_overlaps_are_exact_and_valid() -> None:
    """Large counts neither overflow nor take long."""
    for n, p in ((1, Fraction(1, 2)), (7, Fraction(9, 10)), (40, Fraction(1, 3))):
        terms = {k: comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)}
        exact_and_valid(terms, {k: binomial(k, n, float(p)) for k in terms})
    for n, a, b in ((5, 2, 3), (30, 27, 26), (40, 11, 23), (6, 6, 2)):
        overlaps = range(max(0, a + b - n), min(a, b) + 1)
        terms = {k: Fraction(comb(a, k) * comb(n - a, b - k), comb(n, b)) for k in overlaps}
        exact_and_valid(terms, {k: hypergeometric(k, n, a, b) for k in terms})
    assert binomial(9_000_000, 10_000_000, 0.9) == 1.0
    assert 0 < binomial(9_005_000, 10_000_000, 0.9) < 1e-6
    assert hypergeometric(9_000_000, 10_000_000, 9_000_000, 9_000_000) == 0.0


def drawn(seed: int, *shape: int, rate: float = 0.25) -> Tensor:
    return torch.rand(shape or (4, 8, 20), generator=torch.Generator().manual_seed(seed)) >= rate


def looked_at(*ranks: dict[str, Tensor], dim: int = 1, **changes: Any) -> Finding:
    """The finding for masks that each rank holds its part of, along `dim`."""
    outcomes = []
    for rank, held in enumerate(ranks):
        outcome = {}
        for name, mask in held.items():
            size = list(mask.shape)
            size[dim] *= len(ranks)
            offsets = tuple(rank * mask.shape[d] if d == dim else 0 for d in range(mask.dim()))
            outcome[name] = Shard(mask, offsets, tuple(size))
        outcomes.append(outcome)
    names = tuple(ranks[0])
    seen = evidence(*outcomes, **{"case": CASE, "truth": {}, "from_ranks": names, **changes})
    found = check_masks(seen.run, seen.truth, seen.claims)
    assert found is not None
    return found


NAME, LAYER, NEXT = "mask/0/embedding", "mask/0/layers.0.mlp", "mask/1/embedding"


def test_independent_masks_pass_and_none_claim_nothing() -> None:
    assert "masks" not in run_checks(evidence({"loss/0": torch.ones(())}))
    found = looked_at({NAME: drawn(1), NEXT: drawn(2)}, {NAME: drawn(3), NEXT: drawn(4)})
    assert (found.verdict, found.notes) == (PASS, ())
    assert "8 exact tests of 2 masks find none improbable; the dense model was given them" in found.message


def test_equal_masks_of_different_shards_fail_and_of_different_samples_pass() -> None:
    equal = {NAME: drawn(1)}, {NAME: drawn(1)}
    found = looked_at(*equal)
    assert (found.verdict, found.names, found.ranks) == (FAIL, (NAME,), (0, 1))
    assert "ranks 0 and 1, which hold different shards, agree in 640 of 640 elements" in found.message
    assert looked_at(*equal, dim=0).verdict == PASS
    half = torch.cat([drawn(1)[:2], drawn(2)[2:]])
    assert looked_at({NAME: drawn(1)}, {NAME: half}).verdict == FAIL


def test_a_mask_that_is_drawn_twice_or_by_two_stages_fails() -> None:
    found = looked_at({NAME: drawn(1), NEXT: drawn(2)}, {NAME: drawn(3), NEXT: drawn(3)})
    assert (found.verdict, found.names, found.ranks) == (FAIL, (NEXT,), (1,))
    assert "a mask was drawn twice" in found.message
    stages = case("mode=tp tp=1 pp=2 layers=2 seq=16 dropout=0.25 random=stateful")
    found = looked_at({NAME: drawn(1)}, {NEXT: drawn(1)}, case=stages, from_ranks=(NAME, NEXT))
    assert (found.verdict, found.names, found.ranks) == (FAIL, (NEXT,), (0, 1))
    assert f"{NEXT} on rank 1 (draw 1) is that of {NAME} on rank 0 (draw 0)" in found.message
    assert looked_at({NAME: drawn(1)}, {NEXT: drawn(2)}, case=stages, from_ranks=(NAME, NEXT)).verdict == PASS


def test_the_mask_of_the_first_micro_batch_that_was_drawn_before_is_told() -> None:
    """Each rank has one block a micro-batch."""
    outcomes = []
    for rank, seeds in enumerate([(1, 1), (2, 3)]):
        blocks = [Shard(drawn(seed), (4 * micro, 8 * rank, 0), (8, 16, 20)) for micro, seed in enumerate(seeds)]
        outcomes.append({NAME: blocks, LAYER: blocks if rank == 0 else []})
    seen = evidence(*outcomes, case=CASE, truth={}, from_ranks=(NAME, LAYER))
    found = check_masks(seen.run, seen.truth, seen.claims)
    assert found is not None and (found.verdict, found.names) == (FAIL, (LAYER,))


OTHER_RATE = "elements on rank 0, and its rate of dropout is 0.25"


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (drawn(1, rate=0.05), drawn(2, rate=0.05), OTHER_RATE),
        (drawn(1, rate=0.5), drawn(2, rate=0.5), OTHER_RATE),
        (drawn(1).double(), drawn(2).double(), "must be a tensor of bool"),
    ],
)
def test_another_rate_or_dtype_fails(one: Tensor, other: Tensor, words: str) -> None:
    found = looked_at({NAME: one}, {NAME: other})
    assert (found.verdict, found.names) == (FAIL, (NAME,)) and words in found.message


def test_masks_too_small_to_show_anything_are_no_pass() -> None:
    found = looked_at({NAME: drawn(1, 2, 2, 2)}, {NAME: drawn(2, 2, 2, 2)})
    assert found.verdict == UNKNOWN
    assert reasons_of(found) == ["3 of 3 tests of masks, too small to show anything"]


def test_masks_that_the_dense_model_knows_are_compared_bit_for_bit() -> None:
    """A wrong element of a right field."""
    whole = torch.cat([drawn(1), drawn(2)], 1)
    wrong = drawn(2)
    wrong[3, 7, 19] = ~wrong[3, 7, 19]
    assert looked_at({NAME: drawn(1)}, {NAME: drawn(2)}, truth={NAME: whole}, from_ranks=()).verdict == PASS
    found = looked_at({NAME: drawn(1)}, {NAME: wrong}, truth={NAME: whole}, from_ranks=())
    assert (found.verdict, found.names) == (FAIL, (NAME,))
