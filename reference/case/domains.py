"""The domain of every word of a case, the plainest value first, and how words are changed until a case is legal.

A domain is the values that stand for all that a word can have: experiments on a failing case choose from these
(harness.running.experiments). `repair_words` changes words as the rules that they break propose.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardproof.reference.case.case import Case
from shardproof.reference.errors import CaseError
from shardproof.reference.features import WORDS
from shardproof.reference.language.words import Field, legal_values, write


def domains() -> dict[str, tuple[Any, ...]]:
    """Word -> its values, the plainest first, for words with a domain, a list, true|false or the default ""."""
    found = {word: _values(field) for word, field in WORDS.items()}
    return {word: values for word, values in found.items() if values}


def _values(field: Field) -> tuple[Any, ...]:
    default, domain = field.default, field.metadata["domain"]
    if domain is not None:
        return tuple(domain)
    if isinstance(default, bool):
        return (default, not default)
    others = (value for value in legal_values(field) if value != default)
    return (default, *others) if legal_values(field) or default == "" else ()


Words = dict[str, Any]
"""Word -> its value, of a whole case."""
Problem = CaseError | str
_REPAIRS = 8
"""The most words that are changed before a case is given up."""
_SIZES = frozenset(
    {"seq", "vocab", "hidden", "layers", "kv_heads", "experts", "expert_ffn", "shared_ffn", "kept_groups"}
    | {"kv_lora_rank", "q_lora_rank"}
)
"""Words that take any number that a rule proposes; other words take only values of their domain."""


def words_of(case: Case) -> Words:
    """Every word of a case with its value."""
    return {field.name: getattr(case, field.name) for field in dataclasses.fields(case)}


def problem_of(words: Mapping[str, Any], refuses: Callable[[Case], str] = lambda case: "") -> Problem:
    """The first rule that these words break, or the reason of `refuses`; "" for a case that is taken."""
    try:
        return refuses(Case(**words))
    except CaseError as problem:
        return problem


def repair_words(
    words: Mapping[str, Any],
    fixed: Mapping[str, Any],
    domains: Mapping[str, Sequence[Any]],
    problem_in: Callable[[Words], Problem] = problem_of,
    *,
    search: bool = False,
) -> Words | None:
    """The words of a taken case with those of `fixed`, and others of `words` changed as broken rules propose.

    With `search`, where a rule proposes nothing, the first change of one word that makes the case legal is taken.
    `problem_in` says what makes a case illegal, or "". The result is None if no such case is found.
    """
    changed = {**words, **fixed}
    for _ in range(_REPAIRS):
        problem = problem_in(changed)
        if not problem:
            return changed
        change = _legal_values(problem, fixed, domains)
        if not change and search:
            change = _first_legal(changed, fixed, domains, problem_in)
        if not change:
            return None
        changed |= change
    return None


def _legal_values(problem: Problem, fixed: Mapping[str, Any], domains: Mapping[str, Sequence[Any]]) -> Words:
    """The word and legal value that a broken rule proposes; empty if the word is fixed or cannot have the value."""
    if not isinstance(problem, CaseError):
        return {}
    word, _, legal = problem.legal.rpartition("=")
    key = word or problem.key
    for value in domains.get(key, ()) if key not in fixed else ():
        if write(value) in legal.split("|"):
            return {key: value}
    return {key: int(legal)} if key in _SIZES and key not in fixed and legal.isdecimal() else {}


def _first_legal(
    words: Words, fixed: Mapping[str, Any], domains: Mapping[str, Sequence[Any]], problem_in: Callable[[Words], Problem]
) -> Words:
    changes = ({word: value} for word, values in domains.items() if word not in fixed for value in values)
    return next((change for change in changes if not problem_in({**words, **change})), {})
