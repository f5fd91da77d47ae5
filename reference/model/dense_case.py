"""The part of a case that the dense model reads: cases that differ in how the work is split are equal to it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardproof.reference.case import Case
from shardproof.reference.data.batches import shard_edges
from shardproof.reference.errors import CaseError
from shardproof.reference.features import WORDS

SPLIT: Mapping[str, Any] = {
    word: field.metadata["dense"] for word, field in WORDS.items() if field.metadata["dense"] is not None
}
"""Words that say how the work is split, each with a value that goes with every other word."""


def dense_case(case: Case) -> Case:
    """The case with all words of SPLIT at the same value: its truth is that of the case, bit by bit.

    The case itself where its truth or its data depend on the split (see `reference.data.batches`), or its variant does.
    """
    if case.truth_depends_on_split:
        return case
    try:
        found = replace(case, **SPLIT)
    except CaseError:
        return case
    return found if shard_edges(found) == shard_edges(case) else case
