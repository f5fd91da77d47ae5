"""Names that a subject does not return: inside a kind they leave coverage unknown, unless they are declared.

How many tensors a verdict decides, by kind; the notes below a run's table.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardproof.harness.checking.checks import run_checks
from shardproof.harness.checking.coverage import check_coverage
from shardproof.harness.checking.finding import Finding
from shardproof.harness.checking.measures.spreads import replica_spread
from shardproof.harness.checking.numeric_checks import make_numeric_check
from shardproof.harness.checking.records import Evidence
from shardproof.harness.diagnosing.diagnosis import explanation_of
from shardproof.harness.errors import RequestError
from shardproof.harness.ledger import NO_UPDATE
from shardproof.harness.outcome.blocks import localize
from shardproof.harness.protocols import Shard
from shardproof.harness.running.proof import prove
from shardproof.harness.running.store import Store
from shardproof.harness.subject import NamedSubject, left_out, resolve_subject
from shardproof.harness.verdicts.facts import Note, NoteKind, notes_about, state_text
from shardproof.harness.verdicts.verdict import FAIL, PASS, UNKNOWN, Verdict
from shardproof.reference.case import Case
from shardproof.reference.training import truth as dense
from shardproof.reports.stored.frames import load
from shardproof.reports.stored.unchecked import unchecked_notes
from tests.harness.noted import names_of
from tests.harness.toy_evidence import case as toy_case
from tests.harness.toy_evidence import drawn, evidence, outcome_of, planted, truth
from tests.harness.toy_evidence import named as given_by
from tests.harness.toy_subjects import LoopEngine, Stating

W1, W2, BIAS = (f"layers.0.mlp.{leaf}" for leaf in ("w1.weight", "w2.weight", "w2.bias"))


def answer(*missing: str, declared: tuple[str, ...] = (), **more: torch.Tensor) -> Finding:
    """Coverage of a subject that returns all but these names."""
    values = {name: tensor for name, tensor in truth().items() if name not in missing} | more
    seen = evidence(*(outcome_of(rank, values) for rank in range(2)), declared=declared)
    return check_coverage(seen.run, seen.truth, seen.claims)


def test_a_gap_in_a_kind_is_unknown_and_says_what_to_return_or_declare() -> None:
    found = answer(f"grad/{BIAS}")
    assert found.verdict == UNKNOWN and names_of(found, "not returned") == [f"grad/{BIAS}"]
    rule = "return it, or declare what is left out as subject.unchecked"
    assert found.message.endswith(f"grad/{BIAS} is missing beside other grad/ names: {rule} = ('grad/{BIAS}',)")
    two = answer("loss/1", f"param/{W1}", f"param/{W2}")
    assert two.verdict == UNKNOWN
    assert "loss/1 is missing" in two.message and f"param/{W1}, param/{W2} are missing" in two.message
    grads = [name for name in truth() if name.startswith("grad/")]
    none = answer(*grads)
    assert none.verdict == PASS and set(names_of(none, "not returned")) == set(grads), (
        "a kind that is never returned is a note"
    )


def test_a_declared_gap_passes_and_is_listed_as_left_out_on_purpose() -> None:
    found = answer(f"grad/{BIAS}", declared=("grad/*.bias",))
    assert found.verdict == PASS
    assert names_of(found, "left out on purpose") == names_of(found) == [f"grad/{BIAS}"]
    assert found.message.endswith("; 1 left out on purpose")
    partly = answer(f"grad/{BIAS}", f"grad/{W1}", declared=("grad/*.bias",))
    assert partly.verdict == UNKNOWN and f"grad/{W1} is missing" in partly.message and BIAS not in partly.message
    assert answer(declared=(f"grad/{BIAS}",)).notes == (), "what is returned is compared all the same"


def test_patterns_without_a_name_are_told_with_the_nearest_and_they_or_patterns_of_all_declare_nothing() -> None:
    found = answer(f"grad/{BIAS}", declared=(f"grads/{BIAS}",))
    assert found.verdict == UNKNOWN
    assert f"unchecked='grads/{BIAS}' matches no name of the truth (grad/{BIAS}?)" in found.message
    assert answer(declared=("nothing/*",)).verdict == PASS, "a model without biases has none to leave out"

    for patterns in (("*",), ("l*", "[imt]*", "grad*", "param/*", "act*")):
        found = answer(f"grad/{BIAS}", declared=patterns)
        assert found.verdict == UNKNOWN and "declares every name of the truth" in found.message


@pytest.mark.parametrize("said", ["grad/*.bias", 7, ("grad/*.bias", 7), {"grad/*.bias"}])
def test_a_declaration_that_is_no_tuple_of_words_is_refused(said: object) -> None:
    with pytest.raises(RequestError) as caught:
        left_out(NamedSubject(name="my:subject", call=Stating(unchecked=said)))
    rule = f"unchecked={said!r} must be a tuple of words; legal: unchecked = ('grad/*.bias',)"
    assert str(caught.value) == f"subject=my:subject: {rule}"
    assert left_out(resolve_subject(dense.subject)) == ()


def test_a_run_honours_what_its_subject_declares() -> None:
    """The dense model without the gradients of its biases."""

    def verdict(*unchecked: object) -> str:
        def unbiased(case: Case, device: torch.device) -> dict[str, torch.Tensor]:
            outcome = dense.subject(case, device)
            return {name: x for name, x in outcome.items() if not (name.startswith("grad/") and name.endswith(".bias"))}

        unbiased.unchecked = unchecked  # type: ignore[attr-defined]
        case = Case.parse("mode=tp tp=2 layers=1 hidden=16 heads=2 seq=4 steps=1")
        return prove(case, unbiased, LoopEngine(), checks={"coverage": check_coverage}).verdict

    assert (verdict(), verdict("grad/*.bias")) == (UNKNOWN, PASS)
    with pytest.raises(RequestError, match="unchecked="):
        verdict(7)


EXPERTS = [f"grad/experts.{number}.weight" for number in range(15)]
OTHERS = [f"grad/layers.{number}.weight" for number in range(8)]


def gradients(names: list[str]) -> dict[str, Tensor]:
    return {name: 1 + torch.rand(6, generator=torch.Generator().manual_seed(len(name))).double() for name in names}


def in_bfloat16(true: dict[str, Tensor], undecided: list[str], returned: dict[str, Tensor], **more: Any) -> Evidence:
    """Evidence of a case in bfloat16 in which a control run is far from the truth for these names."""
    case = toy_case().but(dtype="bfloat16")
    control = {name: -tensor if name in undecided else tensor for name, tensor in true.items()}
    return planted(returned, truth=true, case=case, controls=(control,), **more)


def found_by(check: str, seen: Evidence) -> Finding:
    found = make_numeric_check(check)(seen.run, seen.truth, seen.claims)
    assert found is not None
    return found


def test_a_wrong_gradient_that_rounding_may_explain_is_not_decided_and_the_verdict_says_so() -> None:
    true = gradients([*EXPERTS, *OTHERS])
    returned = {**true, EXPERTS[3]: 1.2 * true[EXPERTS[3]]}
    found = found_by("parameter_gradients", in_bfloat16(true, EXPERTS, returned))
    assert found.verdict == PASS
    assert found.decided == {"grad": (8, 23)}
    assert set(names_of(found, "undecided")) == set(EXPERTS)
    found = found_by("parameter_gradients", in_bfloat16(true, [], {**true, OTHERS[0]: 2 * true[OTHERS[0]]}))
    assert (found.verdict, found.decided) == ("fail", {"grad": (23, 23)}), "what is wrong is"


def test_a_kind_with_no_decided_tensor_is_unknown_beside_kinds_that_are_decided() -> None:
    true = {name: tensor for name, tensor in truth().items() if name.startswith(("loss/", "logits/"))}
    found = found_by("forward", in_bfloat16(true, ["logits/0", "logits/1"], true))
    assert found.verdict == UNKNOWN
    words = "none of the logits was compared: rounding alone explains any error; first: logits/0"
    assert found.message == words
    assert found.decided == {"loss": (2, 2), "logits": (0, 2)}
    whole = found_by("forward", in_bfloat16(true, ["logits/1"], true))
    assert (whole.verdict, whole.decided["logits"]) == (PASS, (1, 2))


def test_what_is_left_out_on_purpose_and_what_is_never_returned_counts_among_all() -> None:
    gone = ("act", "logits", f"grad/{BIAS}")
    returned = {name: tensor for name, tensor in truth().items() if not name.startswith(gone)}
    seen = evidence(*(outcome_of(rank, returned) for rank in range(2)), declared=("grad/*.bias",))
    found = found_by("parameter_gradients", seen)
    assert found.decided == {"grad": (3, 4)}
    assert check_coverage(seen.run, seen.truth, seen.claims).decided == {
        "logits": (0, 2),
        "act": (0, 5),
        "act_grad": (0, 5),
    }
    forward = found_by("forward", seen)
    assert (forward.verdict, forward.decided) == (PASS, {"loss": (2, 2)}), "none was returned"


def test_a_tensor_that_is_zero_but_for_rounding_is_decided_since_any_other_value_is_wrong() -> None:
    true = gradients(OTHERS) | {"grad/key.bias": torch.full((6,), 1e-17, dtype=torch.float64)}

    def judged(value: float) -> tuple[str, tuple[int, int]]:
        returned = {**true, "grad/key.bias": torch.full((6,), value, dtype=torch.float64)}
        found = found_by("parameter_gradients", planted(returned, truth=true))
        return found.verdict, found.decided["grad"]

    assert judged(-3e-17) == (PASS, (9, 9))
    assert judged(1e-3) == ("fail", (9, 9))


GONE = "2 logits, 1 act; left out on purpose, so not checked: 1 grad"
LEFT = notes_about(left_out=("grad/a.bias",), not_returned=("logits/0", "logits/1", "act/head"))
NO_NAME = "axis tp: its group has no description"
STATES_NOTHING = Note(kind=NoteKind.CLOSED_FORM, reason="the subject states no expectation")


def noted(kind: NoteKind, *reasons: str) -> tuple[Note, ...]:
    return tuple(Note(kind=kind, reason=reason) for reason in reasons)


@pytest.mark.parametrize(
    ("check", "told", "lines"),
    [
        ("coverage", [("9 of 13 tensors", LEFT)], f"9 of 13 tensors; not returned, so not checked: {GONE}"),
        (
            "ledger",
            [
                ("9 events", (STATES_NOTHING, *noted(NoteKind.DOUBT, NO_NAME))),
                ("9 events", (STATES_NOTHING, *noted(NoteKind.DOUBT, NO_NAME, NO_UPDATE))),
            ],
            f"not certain: {NO_NAME} (2 cases)\nnot certain: {NO_UPDATE} (1 case)",
        ),
        (
            "parallelism",
            [("all talk", (Note(kind=NoteKind.SPLIT_SHARE, numbers=(share,)),)) for share in (99, 1, 99)]
            + [("all talk", ())],
            "from 1 to 99 % of parameter elements are sharded (3 cases)",
        ),
        (
            "coverage",
            [("all", noted(NoteKind.UNREAD_ROWS, f"rows {place}")) for place in (1, 2, 2)],
            "unused vocabulary rows have no gradient to check: rows 2 in 2 cases; other rows in 1 case",
        ),
    ],
)
def test_the_notes_of_a_run(tmp_path: Path, check: str, told: list[tuple[str, tuple[Note, ...]]], lines: str) -> None:
    """The verdicts that leave something open, each from a case of its own; a failed check adds no such line."""
    store = Store(tmp_path, "my:subject", {})
    rows = [(f"mode=tp seed={number}", *one, "pass") for number, one in enumerate(told)]
    rows.append(("mode=tp seed=99", "failed", (), "fail"))
    store.plan([{"case": text, "mode": "tp", "world_size": 2} for text, *_ in rows])
    for text, statement, notes, verdict in rows:
        one = Verdict(case=text, check=check, verdict=verdict, facts=(state_text(statement),), notes=notes)
        store.add(text, "", (), (one,), {})
    store.close()
    assert unchecked_notes(load(store.path)) == lines.splitlines()


def test_a_state_of_a_step_that_the_truth_skips_is_a_failure_with_its_place() -> None:
    """A moment belongs to no step that was made, though parameters are right: unknown unless the
    truth skips that step.
    """
    made = {"exp_avg_after/0/layers.0.mlp.w2.bias": torch.zeros(6)}
    for skips in (False, True):
        known = {**truth(), "skipped/0": torch.tensor(int(skips)), "exp_avg_after/1/layers.0.mlp.w2.bias": drawn(6)}
        found = planted(made, truth=known)
        findings = run_checks(found)
        assert given_by(findings, FAIL) == ({"update"} if skips else set())
        assert given_by(findings, UNKNOWN) == (set() if skips else {"coverage"})
    first = explanation_of(found, findings).first
    assert (first.phase, first.step, first.name) == ("step", 0, *made)
    assert "the dense model skips that step" in findings["update"].message

    # A step that ranks skip alone is decided in grad_sync.
    wrong = planted({"skipped/0": torch.tensor(0)}, truth=known)
    first = explanation_of(wrong, run_checks(wrong)).first
    assert (first.phase, first.step, first.name) == ("grad_sync", 0, "skipped/0")


def test_copies_that_overlap_in_part_are_apart_by_what_they_both_hold() -> None:
    def spread(*shards: Shard) -> float:
        return replica_spread([localize({"w": part}) for part in shards], "w")

    full = torch.arange(1.0, 9.0)
    front, back = Shard(full[:6], (0,), (8,)), Shard(full[2:], (2,), (8,))
    assert spread(front, back) == 0.0
    assert spread(front, Shard(full[2:] + 4 * (full[2:] == 6), (2,), (8,))) == 4 / 10, "a share of the largest value"
    assert spread(Shard(full[:2], (0,), (8,)), Shard(full[2:] + 1, (2,), (8,))) == 0.0
    assert spread(front, Shard(full[:6] * 2, (0,), (8,))) == 0.5
