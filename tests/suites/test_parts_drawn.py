"""Experts, latent attention and further predictions are drawn beside what they go with, and a property meets them."""

from collections.abc import Callable
from functools import cache

import pytest

from bench.clean import Part, cases_of
from shardproof.harness.checking.checks import CHECKS
from shardproof.harness.dense_model import SUBJECT
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.running.proof import prove
from shardproof.reference.case import Case
from shardproof.reference.case.domains import domains
from shardproof.reference.features import FEATURES, PARTS
from shardproof.reference.language.words import declared_words
from shardproof.suites.drawing.pairwise import rows
from shardproof.suites.drawing.profiles import PROFILES
from shardproof.suites.drawing.strategies import cases, every_word, modes_with
from shardproof.suites.mutants.catalogue import MUTANTS
from shardproof.suites.mutants.draws import work
from shardproof.suites.session.sampling import sampled

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
        for case in sampled(every_word(mode, worlds=(4, 6, 8), needs=(part,), **words), 12, number)
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
    flags = rows("tp-sp")[-1]
    found = sampled(cases("tp-sp", flags=flags, parts=tuple(PARTS), layers=2), 80, 0)
    assert {case.layers for case in found} == {2}
    assert all({word: getattr(case, word) for word in flags} == flags for case in found)
    with_a_part = [case for case in found if any(getattr(case, word) for word in PARTS.values())]
    assert len(found) / 10 < len(with_a_part) < len(found) / 2
    assert not any(case.experts for case in sampled(cases("tp-sp"), 20, 0)), "those that were not asked for"
    fixed = sampled(cases("tp-sp", parts=("experts",), experts=0), 20, 0)
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
    return [case for seed in range(2) for case in sampled(strategy, PROFILES["default"], seed)]


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
        told = [prove(case, subject, engine, checks=asked).verdict for subject in (SUBJECT, wrong)]
    assert told == ["pass", "fail"]
