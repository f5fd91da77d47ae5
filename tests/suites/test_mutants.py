"""The catalogue of mutants keeps its rules, and planted bugs are killed by the check that it names."""

import ast
from pathlib import Path

import pytest

from shardproof.harness.checking.checks import CHECKS
from shardproof.harness.diagnosing.causes.cause import CAUSES
from shardproof.harness.ledger import PHASES
from shardproof.harness.resolve import resolve
from shardproof.harness.verdicts.verdict import FAIL
from shardproof.reference.case import Case
from shardproof.reference.case.variants import VARIANTS
from shardproof.reference.features import PARTS
from shardproof.reference.language.core import MODES
from shardproof.suites.mutants.catalogue import (
    FAMILIES,
    HELD_BACK,
    KNOWN,
    MUTANTS,
    SHOWN_BY,
    UNSEEN,
    VARIANT_ROWS,
    Mutant,
    cases_showing,
    holds,
    main,
)
from shardproof.suites.mutants.kill_rows import mutant_killed
from shardproof.suites.session.prover import Prover
from tests import ROOT
from tests.deep import deep
from tests.project import nodes_of

_TOLD = {
    *("norm-computed-twice", "tokens-of-a-data-rank-left-out", "gradients-not-zeroed", "ignored-labels-learned"),
    *("accumulated-gradient-rescaled", "every-row-has-its-own-mean", "same-batch-in-every-step", "loss-mask-left-out"),
    *("optimizer-made-before-the-split", "norm-counts-replicas", "same-batch-on-every-data-rank"),
    *("rows-and-sequence-mixed", "gradient-used-before-it-arrives", "table-range-without-its-last-row"),
    *("fused-qkv-cut-as-three-blocks", "context-mask-at-local-places", "rotary-pairs-that-are-neighbours"),
    *("last-step-not-taken", "hidden-states-replaced-by-the-mlp", "adamw-epsilon-for-half-precision"),
}
"""Bugs of which every profile checks the place and the cause, one for every kind of rule.

Averages, flat memory and bugs of parts are variants: tests/parallel/schemes/test_parallel_variants.py.
"""
_ALONE = {one.kills: one for one in sorted(reversed(MUTANTS), key=lambda one: one.name in _TOLD) if one.alone}
"""Check -> a mutant that it alone kills, if possible one of those above."""
_PROVED = _TOLD | {mutant.name for mutant in _ALONE.values()}
"""Bugs that every profile plants."""
_BY_TOYS = {"parallelism": "tests.harness.toy_subjects:right"}
"""Check -> a subject that fails it alone. For one of ours the ledger would fail too, since it states a closed form."""
_BY_FILES = {
    "saved": "tests.parallel.checkpoints.test_saving:WRONG_SAVES",
    "routing": "tests.harness.checking.test_oracles:WRONG",
    "documents": "tests.harness.running.test_packed_rows:LEAKS",
}
"""Check -> planted bugs that the catalogue cannot hold.

Cases of the catalogue cannot name a folder (saved). A wrong choice of experts makes wrong numbers too, so evidence is
changed instead (routing). Only subjects of their own state rows (documents).
"""


_EVERY = [mutant for mutant in MUTANTS if not mutant.equivalent]
_PLANTED = [mutant for mutant in _EVERY if mutant.name in _PROVED]
_OTHERS = [mutant for mutant in _EVERY if mutant.name not in _PROVED]


@pytest.mark.parametrize(
    "mutant", [*_PLANTED, *deep("six CPU minutes in all", *_OTHERS)], ids=lambda mutant: mutant.name
)
def test_a_planted_bug_is_killed_by_its_check_or_by_it_alone(
    prover: Prover, mutant: Mutant, request: pytest.FixtureRequest
) -> None:
    explain = mutant.name in _TOLD or request.config.getoption("hypothesis_profile", None) == "deep"
    modes = sorted(mutant.modes)
    mode = modes[len(mutant.name) % len(modes)]  # another one for each
    row = mutant_killed(mutant, mode, prover.engine, explain=explain).row
    assert set(mutant.kills.split("|")) & set(row.killed_by) and row.twin == "", row
    if mutant in _ALONE.values():
        assert row.killed_by == (mutant.kills,), row
        assert not explain or row.region_right != "no", row
    if mutant.name in _TOLD:
        assert "no" not in (row.region_right, row.cause_right), row


def test_every_check_has_a_bug_that_no_other_check_kills(prover: Prover) -> None:
    """A new check brings a mutant with `alone=True` that it alone kills. If there is none, the check is not needed."""
    assert set(CHECKS) == {*_ALONE, *_BY_TOYS, *_BY_FILES} and all(map(resolve, _BY_FILES.values()))
    for check, subject in _BY_TOYS.items():
        case = Case.parse("mode=tp tp=2 layers=1 hidden=16 heads=2 seq=4")
        result = prover.proof(case, resolve(subject), explain=False)
        assert [verdict.check for verdict in result.verdicts if verdict.verdict == FAIL] == [check]


def test_cases_of_a_blind_measurement_can_show_their_bugs() -> None:
    assert len({one.name for one in UNSEEN}) == len(UNSEEN) == 330
    for one in UNSEEN:
        assert one.wrong and one.held_back and one.shows(Case.parse(one.case)), one.name


def test_every_id_is_one_that_some_hypothesis_reports() -> None:
    paths = [path for folder in ("diagnosing", "running") for path in (ROOT / "harness" / folder).rglob("*.py")]
    assert (table := ROOT / "harness" / "diagnosing" / "causes" / "cause.py") in paths
    nodes = [node for path in paths if path != table for node in nodes_of(path)]
    literals = {node.value for node in nodes if isinstance(node, ast.Constant)}
    assert set(CAUSES) - literals == set() and "gremlins" not in literals


def test_every_id_is_planted_by_a_row_or_by_a_test_that_names_it() -> None:
    assert {id for id, bug in KNOWN.items() if not bug.planted} == set(SHOWN_BY)
    for id, test in SHOWN_BY.items():
        assert f'"{id}"' in Path(ROOT / test).read_text(), id
    for row in (*MUTANTS, *VARIANT_ROWS):
        assert all(row in KNOWN[id].planted for id in filter(None, row.cause.split("|"))), row.name


def test_every_variant_has_a_source_a_change_and_a_row() -> None:
    assert set(VARIANTS) == {row.name for row in VARIANT_ROWS}
    assert all(bug.changes and bug.wrong and bug.condition for bug in VARIANTS.values())


def test_the_catalogue_prints_a_bug_and_refuses_an_unknown_id(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["permuted", "machine"]) == 0
    out = capsys.readouterr().out
    assert "permuted: the right numbers in another order\n    mutant " in out
    assert "    variant flat-dim1: " in out
    assert "    planted in tests/harness/diagnosing/test_six_lines.py" in out
    assert main(["gremlins"]) == 2
    assert "gremlins: no such id; legal: " in capsys.readouterr().err
    assert main([]) == 0 and len(capsys.readouterr().out.splitlines()) > len(CAUSES)


_ALL = (*MUTANTS, *VARIANT_ROWS, *HELD_BACK)


def test_every_mode_hosts_mutants_of_every_family() -> None:
    for family, mutants in FAMILIES.items():
        hosts = {mode for mutant in mutants for mode in mutant.modes}
        assert hosts == set(MODES) or (family in PARTS and hosts), family


def test_every_row_says_what_it_stands_for_and_what_must_be_told_of_it() -> None:
    assert len(MUTANTS) >= 60 and len({mutant.name for mutant in _ALL}) == len(_ALL)
    for mutant in _ALL:
        assert mutant.stands_for and mutant.modes and set(mutant.modes) <= set(MODES), mutant.name
        assert bool(mutant.kills) != bool(mutant.equivalent), mutant.name
        assert set(mutant.kills.split("|")) <= {*CHECKS, "run", ""}, mutant.name
        assert set(mutant.phase.split("|")) <= {*PHASES, ""}, mutant.name
        assert set(mutant.cause.split("|")) <= {*KNOWN, ""}, mutant.name
        assert "|" not in mutant.kills or not mutant.alone, mutant.name
        assert mutant.held_back == (mutant in HELD_BACK), mutant.name


@pytest.mark.deep("a CPU minute; default cases that can show a bug are looked for in every profile")
def test_the_profile_draws_cases_that_show_every_mutant_in_every_mode() -> None:
    known = [(mutant, mode) for mutant in (*MUTANTS, *HELD_BACK) for mode in mutant.modes]
    assert [f"{mutant.name} in {mode}" for mutant, mode in known if not cases_showing(mutant, mode)] == []


def test_conditions_read_the_words_of_a_case() -> None:
    for condition, text, answer in (
        ("", "mode=tp", True),
        ("bias=true", "mode=tp", True),
        ("bias=false", "mode=tp", False),
        ("positions=rope|learned", "mode=tp", True),
        ("embedding=hidden", "mode=mtp preset=tiny-internlm2", True),
        ("recompute!=full", "mode=tp recompute=full", False),
        ("batch>1 tp<3", "mode=tp batch=2", True),
        ("kv_heads<tp", "mode=isp tp=4 kv_heads=2", True),
        ("kv_heads>tp", "mode=tp tp=2 kv_heads=2", False),
        ("wp!=tp", "mode=isp tp=2 wp=2", False),
        ("wp!=tp wdp>1", "mode=isp tp=4 wp=2 kv_heads=4", True),
        ("padding>0", "mode=tp vocab=509", True),
        ("ffn%tp>0", "mode=autotp tp=2 ffn=33", True),
        ("ffn%tp=0", "mode=autotp tp=2 ffn=33", False),
    ):
        assert holds(condition, Case.parse(text)) is answer, condition
    with pytest.raises(ValueError, match="condition=bias: must be key=value"):
        holds("bias", Case.parse("mode=tp"))
