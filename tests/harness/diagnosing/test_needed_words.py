"""Experiments on a failing case find exactly the words that its failure needs, in few runs, and say what they left."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardproof.harness.diagnosing.needed_words import needed_words
from shardproof.harness.diagnosing.tried_words import OutOfTime
from shardproof.harness.diagnosing.words_text import NeededWords, Right
from shardproof.harness.plain_case import PlainCase, Vocabulary
from shardproof.harness.verdicts.words import when_line
from shardproof.reference.case import Case
from shardproof.reference.case.domains import domains

WORDS = {f"w{number}": ("off", "on", "other") for number in range(30)}
VOCABULARY = Vocabulary.of(WORDS)


def searched(case: Any, of: Any, fails: Callable[[Any], bool | None], most: int = 1000) -> tuple[NeededWords, int]:
    """Words that are found, and the number of runs."""
    runs: list[Any] = []

    def counted(other: Any) -> bool | None:
        if len(runs) == most:
            raise OutOfTime
        runs.append(other)
        return fails(other)

    return needed_words(case, of, counted), len(runs)


@given(st.sets(st.sampled_from(sorted(WORDS)), max_size=4), st.sets(st.sampled_from(sorted(WORDS)), max_size=12))
def test_exactly_the_words_of_a_conjunction_are_found(needed: set[str], further: set[str]) -> None:
    case = VOCABULARY.case(dict.fromkeys(needed | further, "on"))
    found, runs = searched(case, WORDS, lambda other: all(getattr(other, word) == "on" for word in needed))
    assert {one.word for one in found.needed} == needed
    right = (Right(value="off"), Right(value="other"))
    assert all((one.fails, one.right) == (("on",), right) for one in found.needed)
    assert not found.untried
    assert runs <= 4 + 14 * len(needed), "halves, and not one run a word"
    plain, _ = searched(VOCABULARY.case({}), WORDS, lambda other: all(getattr(other, word) == "off" for word in needed))
    assert {one.word for one in plain.needed} == needed, "plain values are found too"


def test_a_shorter_dtype_is_not_tried() -> None:
    """The wider limits of a shorter dtype may hide the error. The failure would then seem to need the longer dtype."""
    dtypes = ("float64", "float32", "bfloat16")
    found, _ = searched(VOCABULARY.case({}), {"dtype": dtypes, **WORDS}, lambda other: other.dtype != "bfloat16")
    assert "dtype" not in when_line(found.when)
    short = VOCABULARY.case({"dtype": "bfloat16"})
    found, _ = searched(short, {"dtype": dtypes, **WORDS}, lambda other: other.dtype != "float64")
    assert (
        when_line(found.when)
        == "fails with dtype=float32|bfloat16; passes with dtype=float64 (tried on 'dtype=float32')"
    )


def test_values_that_fail_alike_are_listed_with_those_that_are_right() -> None:
    case = VOCABULARY.case({"w3": "on", "tp": 2})
    found, _ = searched(case, {**WORDS, "tp": (1, 2)}, lambda other: other.w3 != "off" and other.tp == 2)
    assert (
        when_line(found.when)
        == "fails with w3=on|other and tp=2; passes with w3=off, with tp=1 (tried on 'tp=2 w3=on')"
    )
    found, _ = searched(case, {**WORDS, "tp": (1, 2)}, lambda other: True)
    assert when_line(found.when) == "fails even in the simplest case tried: 'tp=1', on one rank"
    case = VOCABULARY.case({"tp": 4, "w3": "on"})
    found, _ = searched(case, {**WORDS, "tp": (1, 2, 4)}, lambda other: other.tp > 1)
    assert str(found.case).split()[0] == "tp=2", "the plainest number with which the case fails"
    assert when_line(found.when) == "fails with tp=2|4; passes with tp=1 (tried on 'tp=2')"


def test_words_without_time_are_named() -> None:
    case = VOCABULARY.case({"w3": "on", "w7": "on"})

    def fails(other: Any) -> bool:
        return bool(other.w3 == other.w7 == "on")

    _, runs = searched(case, WORDS, fails)
    found, _ = searched(case, WORDS, fails, most=runs - 1)
    assert not found.untried, "further values of the two words come last"
    found, _ = searched(case, WORDS, fails, most=runs - 3)
    assert {one.word for one in found.needed} == {"w3", "w7"}
    assert set(found.untried) == set(WORDS) - {"w3", "w7"}
    assert "no time was left to try w" in when_line(found.when) and " more)" in when_line(found.when)


def test_the_plainest_dtype_and_one_rank_come_first() -> None:
    case = VOCABULARY.case({"dtype": "float32", "tp": 2, "dp": 2, "w3": "on"})
    of = {**WORDS, "dtype": ("float64", "float32"), "tp": (1, 2), "dp": (1, 2)}
    tried: list[str] = []

    def fails(other: Any) -> bool:
        tried.append(f"{other.dtype} {other.tp} {other.dp} {other.w3}")
        return True

    searched(case, of, fails, most=2)
    assert tried == ["float64 2 2 on", "float64 1 1 on"]
    found, _ = searched(VOCABULARY.case({"tp": 2}), of, lambda other: other.tp == 2, most=1)
    assert when_line(found.when).startswith(
        "fails with tp=2; passes with tp=1 (tried on 'tp=2'; no time was left to try w0"
    )
    found, _ = searched(case, of, lambda other: True, most=0)
    assert (
        when_line(found.when)
        == "not searched: no time was left before a case was tried; a larger --when searches longer"
    )


def test_a_case_that_cannot_be_decided_proves_nothing_and_none_has_more_ranks_than_the_failing_one() -> None:
    found, _ = searched(VOCABULARY.case({"w3": "on"}), WORDS, lambda other: True if other.w3 == "on" else None)
    assert found.needed == ()
    found, _ = searched(VOCABULARY.case({"w3": "on"}), WORDS, lambda other: None)
    assert when_line(found.when) == (
        "no other case shows it: each cannot be run or decided, fails for another reason, or changes further words"
    )
    seen: list[PlainCase] = []

    def fails(case: PlainCase) -> bool:
        seen.append(case)
        return True

    searched(VOCABULARY.case({}), {"dp": (1, 2), **WORDS}, fails)
    assert {case.world_size for case in seen} == {1}


def test_a_word_is_not_stated_for_what_changed_with_it() -> None:
    """vocab=509 is refused in other families, so theirs are other words; alone its change is not decided."""
    of = {"family": domains()["family"], "vocab": (512, 509), "dp": (1, 2)}

    def fails(case: Case) -> bool | None:
        return None if (case.family, case.vocab) == ("gpt", 512) else case.vocab == 509 and case.dp == 2

    found, _ = searched(Case.parse("vocab=509 dp=2"), {word: of[word] for word in ("family", "vocab")}, fails)
    assert found.needed == () and "right" not in when_line(found.when)
    found, _ = searched(Case.parse("vocab=509 dp=2"), of, fails)
    assert when_line(found.when) == "fails with dp=2, perhaps vocab=509; passes with dp=1 (tried on 'dp=2')"


def test_what_contradicts_the_failing_case_is_tried_beside_its_own_words() -> None:
    """The plainest case fails for words of its own: of the failing case they would be false."""
    found, runs = searched(
        VOCABULARY.case({"w3": "other", "w5": "on"}),
        WORDS,
        lambda other: (other.w3, other.w5) in {("other", "on"), ("off", "off")},
    )
    assert when_line(found.when) == (
        "fails with w3=other and w5=on; passes with w3=off|on, with w5=off|other (tried on 'w3=other w5=on')"
    )
    assert runs < 4 * len(WORDS)


@pytest.mark.parametrize(
    ("text", "fails", "words"),
    [
        ("cp=2 cp_comm=gather seq=48 bias=false", lambda case: case.cp > 1 and case.cp_comm == "gather", "cp_comm"),
        (
            "family=llama vocab=508 packed=true dp=2 recompute=full recompute_method=block zero=1",
            lambda case: case.packed and case.recompute == "full",
            "packed recompute",
        ),
        ("mode=tp-sp kv_heads=4", lambda case: case.mode != "tp" and case.bias, "mode bias"),
        ("dp=4 zero=3 shard=2 no_sync=true", lambda case: case.shard == 2, "shard"),
        ("mode=isp tp=2 pp=2 layers=4 schedule=interleaved chunks=2", lambda case: case.chunks > 1, "schedule"),
    ],
)
def test_words_of_our_cases_that_others_follow(text: str, fails: Callable[[Any], bool], words: str) -> None:
    """Illegal changes are made beside the words that follow, so that rules of the case language hide nothing."""
    found, _ = searched(Case.parse(text), domains(), fails)
    assert set(words.split()) == {one.word for one in found.needed}
    assert fails(found.case)
    for one in found.needed:
        assert one.right, one.word


def test_every_word_of_a_list_or_a_flag_has_its_values() -> None:
    """A new word is changed by experiments without an entry anywhere; a new number needs one."""
    of = domains()
    assert of["packed"] == (False, True) and of["recompute"] == ("none", "selective", "full")
    assert of["dtype"][0] == "float64" and of["load"] == ("",)
    assert set(Case.read_words("tp=2")) <= set(of)


def test_a_value_that_by_a_rule_needs_another_word_is_found_with_it_where_the_plainer_case_cannot_have_it() -> None:
    case = Case.parse("tp=1 pp=2 layers=2 micro=3 zero=3 no_sync=true parity=1 clip=0.1")
    found, _ = searched(case, domains(), lambda other: bool(other.parity and other.zero and other.pp > 1))
    assert [(one.word, one.fails[0]) for one in found.needed] == [("pp", 2), ("zero", 3), ("parity", 1)]


def test_a_number_of_which_no_plainer_value_is_legal_is_tried_with_the_others() -> None:
    case = Case.parse("tp=1 dp=2 layers=1 heads=12 hidden=48 activation=relu")
    found, _ = searched(case, domains(), lambda other: other.kv_heads > 8 and other.activation == "relu")
    assert {one.word: one.right for one in found.needed}["kv_heads"] == (Right(value=2),)
