"""What of a case the dense model reads, what it must be given, and what it alone decides.

Cases that differ in how the work is split are equal to the dense model (`dense_case`). Masks and initial values that an
implementation drew it must be given. The choices of a learned router are its own: from these follow the rows that ranks
send.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.data.batches import shard_edges
from shardproof.reference.errors import CaseError
from shardproof.reference.features import WORDS
from shardproof.reference.model.parameters import shapes, weights
from shardproof.reference.model.randomness import deviation, given_now, masks, sites
from shardproof.reference.training.steps import train

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


def kinds(case: Case) -> tuple[str, ...]:
    """The kinds of names of an outcome that truth, control and kinks take as given=, none where they know all."""
    return (("mask",) if case.random == "stateful" else ()) + (("init",) if case.init == "shard" else ())


def known(case: Case) -> Case:
    """A case whose truth has the same names and shapes, and knows all: the field in place of what ranks draw."""
    found = case.but(random="field") if case.random == "stateful" else case
    return found.but(init="field") if case.init == "shard" else found


def drawn(case: Case) -> dict[str, Tensor]:
    """Random values of a case, as an outcome has them: masks, and initial values that are Megatron's."""
    names = [f"mask/{step}/{site}" for step in range(case.steps) for site in sites(case)]
    found = masks(case) if case.random == "field" else {name: given_now()[name] for name in names}
    if case.init == "whole":
        return found
    return {f"init/{name}": w for name, w in weights(case, torch.device("cpu")).items()} | found


def deviations(case: Case) -> dict[str, float]:
    """The standard deviation of every parameter's initial values, by name; none where they are this project's own."""
    if case.init == "whole":
        return {}
    return {name: deviation(case, name) for name in shapes(case)}


def chosen_by_the_dense_model(case: Case) -> Mapping[tuple[int, str], Tensor]:
    """(step, layer) -> the experts of every token, bool [dp*micro*rows, seq, experts], rows as those of the logits."""
    return _chosen(dense_case(case))


@lru_cache(maxsize=4)
def _chosen(case: Case) -> Mapping[tuple[int, str], Tensor]:
    outcome = train(case, weights(case, torch.device("cpu")))
    found: dict[tuple[int, str], Tensor] = {}
    for name, chosen in outcome.items():
        kind, _, rest = name.partition("/")
        if kind == "routing":
            step, _, module = rest.partition("/")
            found[int(step), module.removesuffix(".mlp")] = chosen.bool()
    return found
