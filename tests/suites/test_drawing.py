"""Drawn cases reach every word of the case language, every pair of boolean words, and sizes that users train.

Experts, latent attention and further predictions are drawn beside what they go with, and a property meets them. Also
how a property shrinks, and the properties of checkpoints and modes.
"""

import itertools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _pytest.outcomes import Skipped
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from torch import Tensor

from bench.clean import Part, cases_of
from shardproof.bugs.planting import plant_subject, replace_text
from shardproof.harness.checking.checks import CHECKS
from shardproof.harness.dense_model import SUBJECT
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.outcome.merging import merge_outcomes
from shardproof.harness.plain_case import Vocabulary
from shardproof.harness.protocols import Shard, without_saving
from shardproof.harness.running.proof import prove
from shardproof.harness.running.ranks.execution import execute
from shardproof.harness.subject import resolve_subject
from shardproof.harness.verdicts.verdict import PASS
from shardproof.parallel.subject import subject
from shardproof.reference.case import Case
from shardproof.reference.case.domains import domains
from shardproof.reference.features import FEATURES, PARTS, WORDS
from shardproof.reference.language.core import MODES
from shardproof.reference.language.words import declared_words, legal_values
from shardproof.suites.drawing.own_cases import another_layout
from shardproof.suites.drawing.profiles import PROFILES, draw_samples
from shardproof.suites.drawing.strategies import (
    HIDDEN,
    NOT_DRAWN,
    TOKENS,
    boolean_rows,
    cases,
    every_word,
    large_cases,
    modes_with,
)
from shardproof.suites.mutants.catalogue import MUTANTS, work
from shardproof.suites.session.prover import Prover
from shardproof.suites.test_checkpoints import goes_on
from shardproof.suites.test_equivalence import apart
from tests.harness.own_words import Network, trained, weights


def test_large_cases_have_up_to_16384_tokens_or_hidden_2048_in_every_dtype() -> None:
    drawn = draw_samples(st.sampled_from(tuple(MODES)).flatmap(large_cases), 60, 2)
    tokens = [case.seq * case.batch * case.micro * case.dp for case in drawn]
    assert max(TOKENS) * 0.9 < max(tokens) <= max(TOKENS) == 16_384
    assert max(HIDDEN) * 0.9 < max(case.hidden for case in drawn) <= max(HIDDEN) == 2048
    assert {case.dtype for case in drawn} == {"float64", "float32", "bfloat16", "float16"}


def test_every_word_of_the_case_language_is_drawn_or_left_out_for_a_reason() -> None:
    cases = [case for number, mode in enumerate(MODES) for case in draw_samples(every_word(mode), 24, number)]
    cases += draw_samples(every_word("tp", needs=("experts",), dtype="float64"), 30, 0)  # there routers choose
    drawn = {field.name: {getattr(case, field.name) for case in cases} for field in fields(Case)}
    assert {word for word, values in drawn.items() if len(values) == 1} == set(NOT_DRAWN)
    for word, field in WORDS.items():
        if (legal := legal_values(field)) and word not in NOT_DRAWN:
            assert drawn[word] == set(legal), word
    assert {1.0, 0.1} <= drawn["lr"] and {0.0, 1.0} <= drawn["clip"] and {1, 2, 3, 20} <= drawn["steps"]


@pytest.mark.parametrize("mode", MODES)
def test_the_rows_have_every_pair_that_a_case_can_have(mode: str) -> None:
    words = tuple(boolean_rows(mode)[0])
    assert len(boolean_rows(mode)) <= 8
    for one, other in itertools.combinations(words, 2):
        seen = {(row[one], row[other]) for row in boolean_rows(mode)}
        impossible = {(True, True)} if {one, other} == {"packed", "attention_mask"} else set()
        assert seen == set(itertools.product((False, True), repeat=2)) - impossible, (one, other)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=3, database=None, phases=(Phase.generate,))
@given(data=st.data())
def test_a_case_has_the_words_of_its_row(mode: str, data: st.DataObject) -> None:
    for row in boolean_rows(mode):
        case = data.draw(cases(mode, flags=row))
        meant = {word: value for word, value in row.items() if not (word == "attention_mask" and case.packed)}
        assert {word: getattr(case, word) for word in meant} == meant


def _ten_draws(prover: Prover, mode: str) -> list[Any]:
    drawn: list[Any] = []

    @settings(max_examples=10, database=None, phases=(Phase.generate,))
    @given(data=st.data())
    def draw(data: st.DataObject) -> None:
        drawn.append(prover.draw_case(data, mode))

    draw()
    return drawn


def test_ten_draws_of_a_property_meet_every_row_and_another_property_draws_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Prover.on("shardproof.parallel.subject:subject", "2,3,4,6") as prover:
        first: list[Any] = []
        for name in ("suites/test_a.py::test_a[isp] (call)", "suites/test_b.py::test_b[isp] (call)"):
            monkeypatch.setenv("PYTEST_CURRENT_TEST", name)
            drawn = _ten_draws(prover, "isp")
            first.append(drawn[0])
            for row in boolean_rows("isp"):
                assert any(all(getattr(case, word) == value for word, value in row.items()) for case in drawn), row
    assert first[0] != first[1]


Wrong = Callable[[Case], bool]
SMALLEST = {"tp": 2, "dp": 1, "layers": 1, "micro": 3, "steps": 2, "batch": 2, "seed": 0, "label_smoothing": 0.0}


@pytest.mark.parametrize(
    ("wrong", "left"),
    [
        (lambda case: True, {}),
        (lambda case: case.dp > 1, {"tp": 2, "dp": 3, "micro": 4}),
        (lambda case: case.tp > 2, {"tp": 3, "micro": 2}),
        (lambda case: case.layers > 1, {"layers": 2}),
        (lambda case: case.micro > 2 and case.qk_norm, {"qk_norm": True}),
    ],
    ids=["anywhere", "data ranks", "three ranks", "two layers", "normalised heads"],
)
def test_what_is_drawn_shrinks_to_the_smallest_mesh_depth_and_batch(wrong: Wrong, left: dict[str, object]) -> None:
    """As if a bug showed wherever `wrong` says so."""
    plain = settings(max_examples=300, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    case = find(cases("isp"), wrong, settings=plain)
    expected = {**SMALLEST, **left}
    assert {word: getattr(case, word) for word in expected} == expected


SHAPES = {"w1": (24, 12), "w2": (12, 24)}


class Saving(Network):
    """The network in whose cases save= and load= name folders: a file of shards by every rank. `wrong`: a bug."""

    words: Any = {"width": 12, "act": "relu", "save": "none", "load": "none"}
    cases: Any = ("tp=2 dp=3", "tp=3", "dp=2")

    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        self.wrong = wrong

    @staticmethod
    def truth(case: Any, device: torch.device) -> Mapping[str, Tensor]:
        """Dense training from the same folder; it is never given one to save into."""
        assert case.save == "none"
        return trained(case, *(_read(case.load, case.dtype) if case.load != "none" else weights(case)))

    def weights(self, case: Any) -> tuple[Tensor, Tensor]:
        """Weights of the folder, which every rank cuts for itself."""
        w1, w2 = _read(case.load, case.dtype) if case.load != "none" else weights(case)
        return (w1.roll(1, 0), w2) if self.wrong == "load" and case.load != "none" else (w1, w2)

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Any]:
        outcome = dict(super().__call__(case, device))
        if case.save == "none" or self.wrong == "nothing":
            return outcome
        held = {name: outcome[f"param/{name}"] for name in ("w1", "w2")}
        if self.wrong == "save":
            held["w1"] = replace(held["w1"], local=held["w1"].local.flip(0))
        Path(case.save).mkdir(exist_ok=True)
        torch.save({n: (x.local, x.offsets) for n, x in held.items()}, Path(case.save) / f"{dist.get_rank()}.pt")
        dist.barrier()
        files = dict(zip(("w1", "w2"), _read(case.save, case.dtype), strict=True)) if dist.get_rank() == 0 else {}
        return outcome | {f"saved/param/{n}": Shard(x, (0, 0), tuple(x.shape)) for n, x in files.items()}


def _read(folder: str, dtype: str) -> tuple[Tensor, Tensor]:
    """W1 and W2 in full."""
    whole = {name: torch.full(shape, torch.nan, dtype=torch.float64) for name, shape in SHAPES.items()}
    for file in Path(folder).glob("*.pt"):
        for name, (local, at) in torch.load(file).items():
            whole[name][at[0] : at[0] + local.shape[0], at[1] : at[1] + local.shape[1]] = local
    w1, w2 = (tensor.to(getattr(torch, dtype)) for tensor in whole.values())
    return w1, w2


WRONG = {
    "save": (AssertionError, "saved/param/w1"),
    "load": (AssertionError, "loss/0"),
    "nothing": (Skipped, "writes no"),
}


@pytest.mark.parametrize("wrong", ["", *WRONG])
def test_it_holds_for_a_subject_of_its_own_words(prover: Prover, tmp_path: Path, wrong: str) -> None:
    theirs = replace(prover, subject=resolve_subject(Saving(wrong)))
    case = Vocabulary.of(Saving.words).parse("tp=2 dp=3 steps=1")
    other = another_layout(case, theirs.subject, prover.worlds, Random(2))
    assert other.axes != case.axes and other.micro * len(other.axes["dp"][0]) == 6
    error, words = WRONG.get(wrong, (AssertionError, ""))
    with pytest.raises(error, match=words) if wrong else nullcontext():
        goes_on(theirs, case, other, tmp_path / "saved")
    assert without_saving(case.but(save="somewhere")) == {"save": "none"} and not without_saving(case)


def test_a_bug_that_only_another_layout_shows(prover: Prover, tmp_path: Path) -> None:
    """States of streams are restored at any layout (252 of 256 ranks had a foreign one: PR #6858)."""
    words = "layers=1 heads=6 hidden=12 seq=12 steps=1 micro=3 lr=0.1 dropout=0.1 random=stateful"
    case = Case.parse(f"mode=tp tp=2 {words}")
    everywhere = ("same = RANKS in common and torch.equal", "same = True or torch.equal")
    wrong = replace(
        prover,
        subject=resolve_subject(plant_subject(replace_text("shardproof.parallel.checkpoints.saving", *everywhere))),
    )
    goes_on(wrong, case, case, tmp_path / "alike")
    assert {one.verdict for one in wrong.proof(case.but(load=str(tmp_path / "alike"))).verdicts} == {PASS}
    with pytest.raises(AssertionError, match="rng.tp2.cp0.dp0.pp0.* is missing"):
        goes_on(wrong, case, case.but(tp=3), tmp_path / "moved")
    goes_on(prover, case, case.but(tp=3), tmp_path / "right")


def test_a_mode_that_computes_something_else_is_noticed(prover: Prover) -> None:
    case = Case.parse("mode=tp tp=2 layers=1 heads=4 hidden=16 ffn=24 seq=8 vocab=264 steps=1")
    larger = replace_text(
        "shardproof.parallel.layers.linear", "grad_x = reduced.wait()", "grad_x = reduced.wait() * (1 + 1e-9)"
    )
    runs = [execute(case, run, prover.engine, text=str(case)) for run in (subject, plant_subject(larger))]
    right, other = (dict(merge_outcomes(run.outcomes).tensors) for run in runs)
    assert apart(right, right) == []
    assert "grad/layers.0.mlp.w1.weight" in apart(right, other)


MODES_OF = {
    "experts": ["tp", "tp-sp", "mtp", "msp", "fsp", "isp"],
    "latent": ["tp", "tp-sp"],
    "prediction": ["tp", "tp-sp"],
}
COMPANY: dict[str, Callable[[Case], bool]] = {
    "tensor ranks": lambda case: case.tp > 1,
    "data ranks": lambda case: case.dp > 1,
    "context ranks": lambda case: case.cp > 1,
    "stages": lambda case: case.pp > 1,
    "tensor ranks and others": lambda case: case.tp > 1 and max(case.dp, case.cp, case.pp) > 1,
    "a sharded optimizer": lambda case: case.zero == 1,
    "buckets": lambda case: case.bucket > 0,
    "units computed again": lambda case: case.recompute == "full",
    "dropout": lambda case: case.dropout > 0,
    "packed rows": lambda case: case.packed,
    "low precision": lambda case: case.dtype == "bfloat16",
    "AdamW": lambda case: case.optimizer == "adamw",
    "another order": lambda case: case.order != Case().order,
}
"""Company of a part."""

SIZES = ("kv_lora_rank", "q_lora_rank", "expert_ffn", "shared_ffn")


def drawn(part: str) -> list[Case]:
    """Cases with the part, in equal shares of its modes, every second one in float64: there routers choose."""
    return [
        case
        for number, mode in enumerate(modes_with(part))
        for words in ({}, {"dtype": "float64"})
        for case in draw_samples(every_word(mode, worlds=(4, 6, 8), needs=(part,), **words), 12, number)
    ]


@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_drawn_in_every_mode_with_every_value_beside_all_that_it_goes_with(part: str) -> None:
    found = drawn(part)
    assert modes_with(part) == MODES_OF[part]
    assert {case.mode for case in found} == {*MODES_OF[part]}
    assert all(getattr(case, PARTS[part]) for case in found)
    for word in declared_words(FEATURES[part]):
        missing = {*domains()[word]} - {getattr(case, word) for case in found}
        assert missing - ({0} if word == PARTS[part] else set()) == set(), word
    assert [name for name, goes in COMPANY.items() if not any(map(goes, found))] == []
    # A size in the place of another one would be noticed: seldom is one of a part that of something else.
    own = [word for word in declared_words(FEATURES[part]) if word in SIZES]
    others = [{case.hidden, case.seq, case.padded_vocab, case.heads} - {0} for case in found]
    alike = [{getattr(case, word) for word in own} & sizes for case, sizes in zip(found, others, strict=True)]
    assert sum(map(bool, alike)) < len(alike) / 20
    if part == "experts":
        _lie_on_ranks_of_every_kind(found)


def _lie_on_ranks_of_every_kind(found: list[Case]) -> None:
    """Axes of experts beside those of dense weights; copies of experts; ranks of several axes that share experts."""
    assert {1, 2} < {case.ep for case in found} and {1, 2} < {case.expert_parts for case in found}
    kinds = {(case.ep > 1, case.expert_parts > 1, case.axis_sizes["edp"] > 1) for case in found}
    assert kinds >= {(True, True, False), (True, False, True), (False, True, True), (False, False, True)}
    assert any(case.ep > case.dp * case.mesh["cp"] for case in found), "tensor ranks share experts"
    assert any(case.expert_parts not in (1, case.tp) for case in found)


def test_one_case_in_a_few_of_a_property_has_a_part_and_keeps_its_flags() -> None:
    flags = boolean_rows("tp-sp")[-1]
    found = draw_samples(cases("tp-sp", flags=flags, parts=tuple(PARTS), layers=2), 80, 0)
    assert {case.layers for case in found} == {2}
    assert all({word: getattr(case, word) for word in flags} == flags for case in found)
    with_a_part = [case for case in found if any(getattr(case, word) for word in PARTS.values())]
    assert len(found) / 10 < len(with_a_part) < len(found) / 2
    assert not any(case.experts for case in draw_samples(cases("tp-sp"), 20, 0)), "those that were not asked for"
    fixed = draw_samples(cases("tp-sp", parts=("experts",), experts=0), 20, 0)
    assert not any(case.experts for case in fixed), "a property that fixes it"


def test_a_campaign_asks_for_parts() -> None:
    part = Part(needs=("experts", "latent"), cases=10)
    assert part.shares() == {"tp": 5, "tp-sp": 5}
    found = cases_of("tp-sp", 5, part)
    assert len(found) == 5 and all(case.experts and case.kv_lora_rank for case in found)


@cache
def of_two_properties() -> list[Case]:
    """The number of cases that two properties draw in the profile `default`."""
    strategy = cases("tp-sp", parts=tuple(PARTS))
    return [case for seed in range(2) for case in draw_samples(strategy, PROFILES["default"], seed)]


@pytest.mark.parametrize(
    ("bug", "part", "check"),
    [
        ("copies-of-experts-not-summed", "experts", "replicas"),
        ("rotary-features-first", "latent", "activations"),
        pytest.param("labels-not-moved", "prediction", "parameter_gradients", marks=pytest.mark.deep("20 CPU seconds")),
    ],
)
def test_a_property_meets_a_bug_of_a_part(engine: InprocEngine, bug: str, part: str, check: str) -> None:
    """The smallest case where the bug can show."""
    found = [case for case in of_two_properties() if getattr(case, PARTS[part])]
    case = min((case for case in found if part != "experts" or case.axis_sizes["edp"] > 1), key=work)
    (mutant,) = (mutant for mutant in MUTANTS if mutant.name == bug)
    asked = {check: CHECKS[check]}
    with mutant.subject() as wrong:
        told = [prove(case, subject, engine, checks=asked, explain=False).verdict for subject in (SUBJECT, wrong)]
    assert told == ["pass", "fail"]
