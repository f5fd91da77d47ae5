"""Drawn cases reach every word of the case language, and sizes that users train."""

from dataclasses import fields

from hypothesis import strategies as st

from shardproof.reference.case import Case
from shardproof.reference.features import WORDS
from shardproof.reference.language.core import MODES
from shardproof.reference.language.words import legal_values
from shardproof.suites.drawing.sizes import HIDDEN, TOKENS, large
from shardproof.suites.drawing.strategies import NOT_DRAWN, every_word
from shardproof.suites.session.sampling import sampled


def test_large_cases_have_up_to_16384_tokens_or_hidden_2048_in_every_dtype() -> None:
    drawn = sampled(st.sampled_from(tuple(MODES)).flatmap(large), 60, 2)
    tokens = [case.seq * case.batch * case.micro * case.dp for case in drawn]
    assert max(TOKENS) * 0.9 < max(tokens) <= max(TOKENS) == 16_384
    assert max(HIDDEN) * 0.9 < max(case.hidden for case in drawn) <= max(HIDDEN) == 2048
    assert {case.dtype for case in drawn} == {"float64", "float32", "bfloat16", "float16"}


def test_every_word_of_the_case_language_is_drawn_or_left_out_for_a_reason() -> None:
    cases = [case for number, mode in enumerate(MODES) for case in sampled(every_word(mode), 24, number)]
    cases += sampled(every_word("tp", needs=("experts",), dtype="float64"), 30, 0)  # there routers choose
    drawn = {field.name: {getattr(case, field.name) for case in cases} for field in fields(Case)}
    assert {word for word, values in drawn.items() if len(values) == 1} == set(NOT_DRAWN)
    for word, field in WORDS.items():
        if (legal := legal_values(field)) and word not in NOT_DRAWN:
            assert drawn[word] == set(legal), word
    assert {1.0, 0.1} <= drawn["lr"] and {0.0, 1.0} <= drawn["clip"] and {1, 2, 3, 20} <= drawn["steps"]
