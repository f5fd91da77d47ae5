"""The whole subject: what its outcome holds, recomputation by formula, cases of every table, and planted bugs."""

from collections.abc import Iterable
from functools import partial

import pytest
import torch
from torch import Tensor

from shardproof.bugs.planting import plant_subject
from shardproof.harness.engines.threads.dry import DryEngine
from shardproof.harness.predicting.figures import EQUAL
from shardproof.harness.predicting.forecast import forecast_case
from shardproof.harness.running.result import CaseResult
from shardproof.harness.verdicts.verdict import FAIL, PASS
from shardproof.parallel.subject import ParallelSubject, subject
from shardproof.reference.case import Case
from shardproof.suites.mutants.catalogue import Mutant, of_file
from shardproof.suites.session.prover import Prover
from tests.parallel.case_tables import TABLES
from tests.parallel.ranks import CPU, on_ranks, outcome, stated


def test_the_outcome_holds_shards_where_the_case_splits_and_no_padding() -> None:
    case = Case.parse("mode=tp tp=4 kv_heads=4 layers=1 vocab=257")
    outcomes = on_ranks(4, lambda rank: subject(case, CPU))
    held = [[tuple(box.local.shape) for box in outcome["grad/embedding.tokens.weight"]] for outcome in outcomes]
    assert held == [[(128, 64)], [(128, 64)], [(1, 64)], []]
    logits = [[tuple(box.local.shape) for box in outcome["logits/0"]] for outcome in outcomes]
    assert logits == [[(2, 32, 128)] * 2, [(2, 32, 128)] * 2, [(2, 32, 1)] * 2, []]
    assert isinstance(outcomes[0]["grad/final_norm.weight"], Tensor)
    assert [box.local.shape[0] for box in outcomes[1]["param/layers.0.mlp.w1.weight"]] == [64]


def test_too_large_logits_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.parse("mode=tp tp=2 layers=1 steps=1")
    elements = case.dp * case.micro * case.tokens * case.vocab
    for limit, kept in ((elements, True), (elements - 1, False)):
        monkeypatch.setattr("shardproof.parallel.training.LARGEST_LOGITS", limit)
        (first, _) = on_ranks(2, lambda rank: set(subject(case, CPU)))
        assert ("logits/0" in first) is kept


def test_a_mode_that_is_not_offered_is_refused() -> None:
    with pytest.raises(ValueError, match="mode=tp: is not offered here; legal: isp"):
        ParallelSubject(only=("isp",))(Case.parse("mode=tp tp=2"), CPU)


def test_modules_without_a_dense_counterpart_are_not_comparable() -> None:
    for module in ("", "embedding.tokens", "layers", "layers.0.attention.core"):
        assert subject.activations(Case.parse("mode=tp tp=2"), 0, module, torch.zeros(2, 2, 2)) is None


@pytest.mark.parametrize(("size", "stops"), [(2, False), (3, True)])
def test_uniform_units(size: int, stops: bool) -> None:
    """Megatron repeats 2 Ls sums, torch's early stop one less for each of Ls/k units (around.md 16)."""
    sums = 12 - stops * 6 // size
    for words, ops in {
        "mode=tp": {"all_reduce": sums},
        "mode=tp-sp": {"all_gather": 12, "reduce_scatter": sums},
        "mode=tp distribute_saved=true": {"all_reduce": sums, "all_gather": 6 // size},
    }.items():
        form = f"recompute=full recompute_layers={size} early_stop={str(stops).lower()}"
        case = Case.parse(f"{words} tp=2 heads=4 kv_heads=2 hidden=16 seq=8 layers=6 micro=1 steps=1 {form}")
        assert stated(case, "op", where=lambda term: term.phase == "recompute") == ops, words


FORMS = (
    "recompute=none",
    *(f"recompute=full recompute_method=block recompute_layers={layers}" for layers in (1, 3)),
    "recompute=full",
    "recompute=full distribute_saved=true",
)
"""From the most that is saved to the least."""


def test_less_is_saved_the_more_is_computed_again(dry: DryEngine) -> None:
    found = []
    for form in FORMS:
        case = Case.parse(f"mode=tp tp=2 layers=4 heads=4 kv_heads=2 hidden=32 seq=64 batch=3 dtype=bfloat16 {form}")
        told = forecast_case(case, subject, dry)
        assert told.ledger == EQUAL
        found.append(int(told.memory.saved))
    assert found == sorted(set(found), reverse=True)
    assert 2 * (found[0] - found[1]) == found[1] - found[2]
    assert found[-2] - found[-1] == 4 * 3 * 64 * 32  # of four inputs in bfloat16 halves are left


def test_a_deep_model_is_measured_where_its_layers_repeat(dry: DryEngine) -> None:
    """In whole units, and behind the first layers of their own kind."""
    case = Case.parse("tp=2 heads=4 kv_heads=2 hidden=8 seq=4 recompute=full recompute_layers=2 layers=12")
    told = forecast_case(case, subject, dry)
    assert (told.ledger, told.depths) == (EQUAL, (6, 10))
    assert Case.parse("layers=9 recompute=full recompute_method=block recompute_layers=4").repeating_layers == (4, 1)


def test_gradients_are_bit_for_bit_those_without() -> None:
    sizes = "tp=2 layers=4 heads=4 kv_heads=2 hidden=16 ffn=24 vocab=40 seq=6 steps=1 micro=3"
    plain = outcome(sizes)
    for form in FORMS[2:]:
        other = outcome(f"{sizes} {form}")
        assert all(torch.equal(plain[name], other[name]) for name in plain), form


def proved(prover: Prover, words: str, checks: Iterable[str] = (), *, repeat: bool = True) -> CaseResult:
    """The case on our implementation, of which every check passes, these among them; run twice with `repeat`."""
    result = prover.proof(Case.parse(words), subject, repeat=repeat)
    assert [verdict.message for verdict in result.verdicts if verdict.verdict != PASS] == []
    assert {*checks} <= {verdict.check for verdict in result.verdicts}
    return result


OF_TABLES = [(name, words) for name, table in TABLES.items() for words in table.cases]
TWICE = OF_TABLES[::3]
"""Run twice, as every third case of a run is, and some of every table: default cases are as many as all of them."""
RARE = pytest.mark.deep("a CPU second each, beside as many default cases")


@pytest.mark.parametrize(
    ("table", "words"), [*TWICE, *(pytest.param(*one, marks=RARE) for one in OF_TABLES if one not in TWICE)]
)
def test_training_is_the_dense_models_and_every_byte_is_stated(prover: Prover, table: str, words: str) -> None:
    again = (table, words) in TWICE
    result = proved(prover, f"{TABLES[table].sizes} {words}", TABLES[table].checks.split(), repeat=again)
    assert again == ("determinism" in {verdict.check for verdict in result.verdicts})
    case, checks = result.case, {verdict.check for verdict in result.verdicts}
    assert isinstance(case, Case) and result.evidence is not None
    if table in ("data_parallel", "context"):
        waits = "tp=1" in words if table == "data_parallel" else "cp_comm" in words and "ring" not in words
        assert "overlap" in checks or waits or not case.overlap
    if case.pp > 1:
        assert any(event.phase == "pipeline" for event in result.events)
    if table == "dropout":
        masks = [name for name in result.evidence.run.tensors if name.startswith("mask/")]
        assert len(masks) == case.steps * (1 + 3 * case.layers), "the embedding's, and three sites of every layer"
    if table == "experts":
        chosen = case.dp * case.micro * case.tokens * case.top_k
        for name in case.layers_with_experts:
            rows_E = result.evidence.run.tensors[f"routing/0/{name}.mlp"].sum((0, 1))
            assert int(rows_E.sum()) <= chosen if case.capacity else int(rows_E.sum()) == chosen, "tokens are conserved"
            if case.routing == "one":
                assert int((rows_E == 0).sum()) == case.experts - case.top_k, "experts without tokens"


@pytest.mark.parametrize("bug", of_file("tests/schemes"), ids=lambda bug: bug.name)
def test_a_planted_bug_is_caught(prover: Prover, bug: Mutant) -> None:
    result = prover.proof(Case.parse(bug.case), plant_subject(bug.sources()), explain=False, repeat=False)
    assert {*bug.kills.split("|")} & {verdict.check for verdict in result.verdicts if verdict.verdict == FAIL}


MISSING = {"context-is-not-exchanged-back": "all-to-alls", "gradients-of-a-cut-sum-are-not-gathered": "reduce_scatters"}
"""Bug -> which moves lack their conjugates."""


@pytest.mark.parametrize("bug", of_file("tests/conjugates"), ids=lambda bug: bug.name)
def test_a_missing_conjugate_is_told_without_a_closed_form(bug: Mutant, prover: Prover) -> None:
    """A function has none."""
    case = Case.parse(bug.case)
    assert case.mode in subject.modes
    (right,) = [v for v in prover.proof(case, partial(subject)).verdicts if v.check == "ledger"]
    assert right.verdict == "pass"
    result = prover.proof(case, partial(plant_subject(bug.sources())))
    (wrong,) = [verdict for verdict in result.verdicts if verdict.check == "ledger"]
    assert wrong.verdict == "fail"
    assert MISSING[bug.name] in wrong.message
