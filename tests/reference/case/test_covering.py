"""The default cases: which pairs of values they hold, found out from random legal cases instead of their own search."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable
from functools import lru_cache
from itertools import chain, combinations
from typing import Any

import pytest

from reference.case import Case, CaseError, covering
from reference.case.covering import FIXED, SHARED, covering_cases, paired_cases
from reference.case.modes import MODES
from reference.case.rules import legal_words
from reference.case.schemes import SCHEMES
from reference.case.written import spread_cases

NUMBERS = {"tp": (2, 4), "dp": (1, 2), "wp": (1, 2, 4), "kv_heads": (2, 8), "clip": (0.0, 0.1)}
NUMBERS |= {"label_smoothing": (0.0, 0.1)}
VARIED = [field.name for field in dataclasses.fields(Case) if field.name not in {*FIXED, *SHARED}]
DRAWS = 3000
Level = tuple[str, object]


def drawn(mode: str, ranks: int) -> list[Case]:
    """Legal cases of this mode on so many ranks at most, each of whose words is drawn with equal chances."""
    return [case for case in all_drawn(mode) if case.world_size <= ranks]


@lru_cache
def all_drawn(mode: str) -> list[Case]:
    """Legal cases of this mode on 2 to 8 ranks."""
    source = random.Random(mode)
    values: dict[str, Any] = {word: NUMBERS.get(word) or legal_words().get(word) or (False, True) for word in VARIED}
    values["wp"] = NUMBERS["wp"] if mode == "isp" else (1,)
    found = []
    for _ in range(DRAWS):
        words: dict[str, Any] = {**SHARED, **{word: source.choice(known) for word, known in values.items()}}
        try:
            found.append(Case(mode=mode, **words))
        except CaseError:
            continue
    return found


def values(case: Case) -> list[Level]:
    """What a case covers alone: the value of each word, and of wp whether it is that of tp."""
    return [(word, case.wp != case.tp if word == "wp" else getattr(case, word)) for word in VARIED]


def pairs(cases: Iterable[Case], *, besides: Iterable[Level] = ()) -> set[tuple[Level, Level]]:
    """Every two values that stand together in one of the cases, but for some values."""
    return {pair for case in cases for pair in combinations([own for own in values(case) if own not in besides], 2)}


@pytest.mark.parametrize("mode", [mode for mode in MODES if not MODES[mode].brief])
def test_every_two_words_that_are_no_defaults_meet_in_a_default_case(mode: str) -> None:
    cases, default = paired_cases(mode), values(Case.of(mode=mode))
    possible = pairs(drawn(mode, 4), besides=default)
    assert len(possible) > 250
    assert possible - pairs(cases) == set()
    for number in range(1, len(cases)):
        fewer = [*cases[:number], *cases[number + 1 :]]
        assert possible - pairs(fewer), "each case but the plain one covers what no other does"


@pytest.mark.parametrize("mode", MODES)
def test_deep_covers_every_two_values(mode: str) -> None:
    cases = paired_cases(mode, deep=True)
    assert pairs(drawn(mode, 8)) - pairs(cases) == set()
    assert {case.world_size for case in cases} == {2, 4, 8}


@pytest.mark.parametrize("mode", MODES)
def test_the_cases_can_show_a_bug(mode: str) -> None:
    plain, *cases = paired_cases(mode)
    assert plain.world_size == 2 and {case.world_size for case in cases} <= {2, 4}
    assert len({*cases, plain}) == 1 + len(cases)
    for case in cases:
        own = ("ffn", "vocab") if MODES[mode].brief else ()
        assert {word: getattr(case, word) for word in SHARED if word not in own}.items() <= SHARED.items()
        assert all(getattr(Case(), word) != getattr(case, word) for word in SHARED)
        assert not {case.micro, case.batch} & {case.tp, case.dp, case.wp}
        assert (case.dtype, case.layers) == ("float64", 2 if mode == "isp" else case.steps)
    assert plain.layers == 2 and plain.micro == 3
    assert mode != "isp" or {case.wp > case.tp for case in cases if case.wp != case.tp} == {False, True}


@pytest.mark.parametrize("mode", MODES)
def test_every_value_that_is_no_default_is_in_a_case_of_two_layers_and_two_steps(mode: str) -> None:
    """But for the family, whose words have theirs."""
    cases = paired_cases(mode)
    shown = {level for case in cases if case.layers == case.steps == 2 for level in values(case)}
    missing = {level for case in cases for level in values(case)} - {*values(Case.of(mode=mode))} - shown
    assert {word for word, _ in missing} <= {"family"}
    assert MODES[mode].brief or sum(case.steps == 1 for case in cases) >= len(cases) // 2
    deep = paired_cases(mode, deep=True)
    always_two = paired_cases(mode, lambda case: "steps=1" if case.steps == 1 else "")
    assert {(case.layers, case.steps) for case in (*deep, *always_two)} == {(2, 2)}


@pytest.mark.parametrize("mode", MODES)
def test_every_value_of_a_word_of_other_schemes_is_in_a_default_case(mode: str) -> None:
    """In every mode that has the word."""
    paired, spread = paired_cases(mode), spread_cases(mode)
    assert covering_cases(mode) == (*paired, *spread)
    assert {case.world_size for case in spread} <= {2, 4}
    has = {
        "context parallelism": not MODES[mode].uneven,
        "data parallelism": MODES[mode].data_parallel,
        "pipeline parallelism": MODES[mode].stages,
        "recomputation": bool(spread),
        "replica parity": bool(spread),
    }
    for word in chain.from_iterable((*scheme.words, "order") for name, scheme in SCHEMES.items() if has.get(name)):
        seen = {getattr(case, word) for case in (*paired, *spread)}
        whole = word == "distribute_saved" and MODES[mode].sequence  # hidden states are split already
        whole |= MODES[mode].gathers_weights and word in ("shard", "no_sync", "prefetch", "wgrad")  # zero=2|3, none
        assert whole or (len(seen) > 1 and seen >= {*legal_words().get(word, ())}), word
    combined = spread_cases(mode, paired)
    assert set(spread) <= set(combined) and len(combined) >= 3 * len(spread)
    assert {case.world_size for case in combined} <= {2, 4, 8}


def test_a_brief_list_has_what_only_its_mode_does() -> None:
    """autotp: uneven shares of heads, features and tokens; both heads; the table shared and not."""
    _, *cases = paired_cases("autotp")
    assert len(cases) == len(MODES["autotp"].brief) == 2
    assert all(size % case.tp for case in cases for size in (case.kv_heads, case.ffn, case.vocab))
    assert {(case.head, case.tied) for case in cases} == {("gather", False), ("sum", True)}
    for word in ("fuse_qkv", "fuse_mlp", "bias", "qk_norm", "overlap", "packed"):
        assert {getattr(case, word) for case in covering_cases("autotp")} == {False, True}, word
    assert len(covering_cases("autotp", lambda case: "no packs" if case.packed else "")) == 2


def test_the_list_is_the_same_every_time() -> None:
    assert covering_cases("isp") == covering_cases("isp")


def test_what_a_subject_refuses_is_left_out_and_the_rest_is_covered() -> None:
    def refuses(case: Case) -> str:
        return "no packs, no learned positions" if case.packed or case.positions == "learned" else ""

    cases, default = covering_cases("msp", refuses), values(Case.of(mode="msp"))
    assert not any(refuses(case) for case in cases[1:])
    taken = [case for case in drawn("msp", 4) if not refuses(case)]
    assert pairs(taken, besides=default) - pairs(cases) == set()
    assert len(covering_cases("tp", lambda case: "never")) == 1, "its skip says why"
    built_for_8_heads = covering_cases("tp", lambda case: "" if case.heads == 8 else "8 heads only")
    assert {(case.tp, case.dp) for case in built_for_8_heads} == {(2, 1), (4, 1), (2, 2)}
    assert {case.heads for case in built_for_8_heads} == {8}


def test_a_new_word_is_covered_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Wider(Case):
        mirrored: bool = False

    with monkeypatch.context() as patch:
        patch.setattr(covering, "Case", Wider)
        assert {getattr(case, "mirrored", None) for case in paired_cases("tp")} == {False, True}
    numbers = {word: known for word, known in covering.NUMBERS.items() if word != "clip"}
    monkeypatch.setattr(covering, "NUMBERS", numbers)
    with pytest.raises(LookupError, match="word clip: has no values to cover; legal: an entry in NUMBERS"):
        covering_cases("tp")
