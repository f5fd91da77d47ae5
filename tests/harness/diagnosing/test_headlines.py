"""Headlines of a failed case: the largest error of a place, faults apart, laws of calls with their line."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from shardproof.harness.checking.checks import run_checks
from shardproof.harness.checking.records import Repeats, Truth
from shardproof.harness.diagnosing.diagnosis import explanation_of
from shardproof.harness.diagnosing.first_place import first_place
from shardproof.harness.outcome.merging import Merged
from shardproof.harness.protocols import Shard
from shardproof.harness.verdicts.facts import state_fact
from shardproof.reports.stored.failures import bugs_of_run
from tests.harness.diagnosing.test_six_lines import LOSS, W1
from tests.harness.noted import failed
from tests.harness.toy_evidence import (
    a_term,
    case,
    drawn,
    events,
    evidence,
    ids_of,
    outcome_of,
    planted,
    told_by,
    truth,
)


def test_the_largest_error_of_a_place_is_its_headline_and_other_causes_are_another_fault() -> None:
    records = [
        failed("tp=2", "replicas", LOSS, cause="drift", error=4e-17),
        failed("tp=2", "forward", LOSS, error=2e-9, allowed=1e-9),
        failed("tp=2", "update", LOSS, error=4.0, allowed=1e-9),
        failed("tp=2", "ledger", LOSS, error=3.0),
        failed("tp=4", "forward", LOSS, error=1.0, allowed=1e-9),
    ]
    both, drift = bugs_of_run(records)
    assert (both.verdict.case, both.verdict.check, [*both.others]) == ("tp=2", "update", ["forward", "ledger"])
    assert (drift.verdict.check, drift.follows) == ("replicas", "")
    assert bugs_of_run([*records, failed("tp=2", "merge", LOSS)])[0].verdict.check == "merge"  # before any number


def test_replicas_that_rounding_sets_apart_do_not_explain_a_gross_error() -> None:
    wrong = {W1: truth()[W1] * 5}
    first, second = (outcome_of(rank, {**truth(), **wrong}) for rank in range(2))
    second["loss/0"] = torch.nextafter(second["loss/0"], torch.tensor(torch.inf, dtype=torch.float64))
    seen = evidence(first, second)
    gross, drift = told_by(seen, "parameter_gradients"), told_by(seen, "replicas")
    assert gross[3] == "first:  backward of layers.0.mlp.w1 in step 0: grad/layers.0.mlp.w1.weight"
    assert gross[4].startswith("causes: it is 5 x the truth")
    assert drift[3].startswith("first:  loss in step 0: loss/0")
    assert drift[4].startswith("causes: every rank's is right but for its last bits")
    alone = told_by(replace(planted(wrong), repeats=Repeats(runs=(seen.run.outcomes,))), "determinism")
    assert alone[4].startswith("causes: two runs of the same ranks") and "they differ by" in alone[2]


@pytest.mark.parametrize("factor", [2.0, 1.0])
def test_replicas_that_differ_by_rounding_are_compared_where_all_are_wrong(factor: float) -> None:
    value = truth()[W1] * factor
    seen = evidence({**truth(), W1: value}, {**truth(), W1: value * (1 + 2e-15)})
    found = run_checks(seen)
    assert found["replicas"].verdict == "fail"
    assert found["parameter_gradients"].verdict == ("fail" if factor > 1 else "pass")
    assert all(decided <= count for decided, count in found["parameter_gradients"].decided.values())
    if factor > 1:
        assert found["parameter_gradients"].names == (W1,)
        assert told_by(seen, "parameter_gradients")[4].startswith("causes: it is 2 x the truth")


def test_a_loss_that_other_initial_values_explain_is_wrong_in_the_module_that_has_them() -> None:
    start = state_fact("starts_otherwise", rank=1, name=W1.removeprefix("grad/"))
    seen = planted({"loss/0": truth()["loss/0"] * 2}).with_found(other_start=start)
    places = [first_place(seen, [name], None) for name in ("loss/0", "act/head", "loss/1")]
    assert [(one.phase, one.region, one.step) for one in places] == [
        ("forward", W1.removeprefix("grad/").removesuffix(".weight"), 0),
        ("forward", "head", 0),
        ("loss", "", 1),
    ]
    samples = state_fact("samples_differ", step=0, ranks=[1], truth=[0])
    assert first_place(seen.with_found(other_samples=samples), ["loss/0"], None).region == ""
    begun = state_fact("other_begin", names=["init/weight"], parameters=1, ranks=[1])  # of two launches, in no module
    other = first_place(seen.with_found(other_start=begun), ["init/weight"], None)
    assert (other.phase, other.region, other.name) == ("forward", "", "init/weight")


def test_replicas_that_differ_by_more_are_no_value_to_compare() -> None:
    far = truth()[W1] * 20
    for other in (2 * far, far.where(far != far.max(), torch.tensor(torch.nan, dtype=far.dtype))):
        found = run_checks(evidence({**truth(), W1: far}, {**truth(), W1: other}))
        assert (found["replicas"].verdict, found["parameter_gradients"].verdict) == ("fail", "pass")


@pytest.mark.parametrize("form", [lambda tensor: tensor, lambda tensor: Shard(tensor, (0,), (6,))])
def test_values_whose_mean_is_the_truth_were_never_averaged(form: Callable[[torch.Tensor], Any]) -> None:
    name, apart = "grad/layers.0.mlp.w2.bias", drawn(6)
    outcomes = [{name: form(truth()[name] + sign * apart)} for sign in (1, -1)]
    seen = evidence(*outcomes, case=case("mode=tp dp=2 tp=1"), events=(), expectation=None)
    (cause,) = explanation_of(seen, {"replicas": run_checks(seen)["replicas"]}).causes
    assert (cause.id, cause.words.rpartition(", ")[2]) == ("not_averaged", "never averaged over dp")
    other = evidence({name: truth()[name] + apart}, {name: truth()[name]}, case=case("mode=tp dp=2 tp=1"), events=())
    assert "not_averaged" not in ids_of(other)


def test_a_rank_that_holds_nothing_is_neither_right_nor_wrong() -> None:
    name, true = "grad/layers.0.mlp.w2.bias", truth()
    parts = (true[name][:3] + 1, true[name][3:] + 1, true[name][6:])
    outcomes = ({name: Shard(part, (start,), (6,))} for part, start in zip(parts, (0, 3, 6), strict=True))
    seen = evidence(*outcomes, case=case("mode=tp dp=3 tp=1"), events=(), expectation=None)
    findings = {"parameter_gradients": run_checks(seen)["parameter_gradients"]}
    assert explanation_of(seen, findings).first.beside == ("wrong on ranks 0 1; rank 2 holds no element of it",)


def test_a_broken_law_of_calls_is_said_with_module_and_line() -> None:
    exchange = a_term(phase="forward", region="layers.0.mlp", op="all_to_all", reduce_op="", calls=2)
    back = a_term(phase="backward", region="head")
    calls = tuple(replace(event, needs_gradient=True) for event in events((exchange, back)))
    seen = planted({W1: truth()[W1] * 5}, events=calls, expectation=None)
    said = "4 all-to-alls of 1536 B over tp go forward and 0 of 0 B backward: each must have its conjugate, "
    said += "module layers.0.mlp, at model.py:7"
    place = f"first:  backward of layers.0.mlp: {W1}; in the ledger: {said}"
    assert told_by(seen, "parameter_gradients")[3] == place
    assert told_by(seen, "ledger")[0] == f"what:   {said} (check ledger)"


@pytest.mark.parametrize(
    ("wrong", "module"),
    [
        (("layers.0.norm.weight", "layers.1.head.weight"), "layers.0.norm"),
        (("layers.0.norm.weight", "layers.1.norm.weight"), "layers.0.norm"),
        (("layers.0.norm.weight", "layers.1.norm.weight", "layers.1.head.weight"), ""),
    ],
)
def test_the_module_of_an_update_is_named_where_its_step_updates_other_parameters_right(
    wrong: tuple[str, ...], module: str
) -> None:
    """If a whole step is wrong, the optimizer's step alone is the place, although the step before it is right."""
    names = ("layers.0.norm.weight", "layers.1.norm.weight", "layers.1.head.weight")
    states = {f"param_after/{step}/{name}": torch.ones(3) for step in range(2) for name in names}
    seen = planted({})
    run = replace(seen.run, merged=Merged(tensors=states, flaws=()), outcomes=())
    seen = replace(seen, run=run, truth=Truth(tensors=states))
    assert first_place(seen, [f"param_after/1/{name}" for name in wrong], None).region == module
