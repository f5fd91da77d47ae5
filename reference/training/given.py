"""Values that the dense model cannot know and must be given: masks and initial values that an implementation drew."""

import torch
from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.model.dropout import masks, sites
from shardproof.reference.model.given import given_now
from shardproof.reference.model.parameters import shapes, weights


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
    from shardproof.reference.model.field import deviation  # noqa: PLC0415

    return {name: deviation(case, name) for name in shapes(case)}
