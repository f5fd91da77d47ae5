"""Experts as a scheme: what the words of `reference.features.experts` replace of a strategy.

    replaced     | by
    parts        | the block in the place of an MLP
    placements   | experts over ep, their inner features over etp
    partial      | the router's gradient is a sum over this tensor rank's own tokens
    activation   | its logits lie as these tokens do
    data         | gradients of experts hold the tokens of all etp*ep ranks already; they are summed over edp
    norm         | squares of their gradients are summed over etp and ep: each part counts once
    rows, step   | the calls of the dispatcher; the choices as `routing/<step>/<module>`

A gradient is a sum over tokens, divided once by the number of all tokens, so that it needs no factor for ranks. The
scale follows the data, the group follows the replicas (experts.md 21.6).
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from parallel.communication.layout import Box, Cut, Placement, rows, whole
from parallel.communication.mesh import Mesh
from parallel.experts.bias import BIASES, move_biases
from parallel.experts.block import ExpertBlock, blocks_of
from parallel.experts.gradients import norm_of_all, over_copies
from parallel.experts.rows import rows_of_experts
from parallel.layers.mlp import Mlp
from parallel.layers.roles import mlp_linears
from parallel.model.strategy import Parts, Rank, Step, Strategy, Value
from parallel.randomness.dropout import Dropout
from reference.case import Case

AFTER = ("context", "pipeline")


def applied(strategy: Strategy, case: Case) -> Strategy:
    """The strategy with the experts of this case; itself without any."""
    if not case.experts:
        return strategy

    def placements(case: Case) -> dict[str, Placement]:
        return {name: _placed(name, place) for name, place in strategy.placements(case).items()}

    def parts(case: Case, mesh: Mesh, device: torch.device) -> Parts:
        plain = strategy.parts(case, mesh, device)
        made = partial(_block, case, strategy, plain, mesh, placements(case), device)
        return replace(plain, branches={**plain.branches, "experts": made})

    def step(case: Case, plain: Step) -> Step:
        before = strategy.step(case, plain)
        return replace(
            before,
            reductions={
                **before.reductions,
                "data": partial(over_copies, before.reductions["data"]),
                **({"expert bias": move_biases} if case.bias_rate else {}),
            },
            norm=partial(norm_of_all, before.norm),
            beside=lambda rank, step: {**before.beside(rank, step), **_choices(rank, step)},
        )

    own = ("etp", "ep", *(("edp",) if case.zero else ()), *case.pipeline_axes)
    return replace(
        strategy,
        placements=placements,
        activation=lambda case, module: _activation(case, strategy, module),
        partial=lambda case, name: _partial(case, name) or (not _split(name) and strategy.partial(case, name)),
        apart={**strategy.apart, "edp": own},
        parts=parts,
        rows=(*strategy.rows, *rows_of_experts(case), *(BIASES if case.bias_rate else ())),
        step=step,
    )


def _placed(name: str, place: Placement) -> Placement:
    """The experts over ep, and the inner features of each over etp."""
    if not _split(name):
        return place
    inner = 2 if name.endswith(".down.weight") else 1
    return replace(place, cuts=(*place.cuts, Cut(axis="ep"), Cut(axis="etp", dim=inner)))


def _split(name: str) -> bool:
    """Is this parameter one of the experts, which has seen the tokens of all ranks that send any?"""
    return ".mlp.experts." in name


def _partial(case: Case, name: str) -> bool:
    """Has a tensor rank seen its own tokens alone?"""
    return name.endswith(".mlp.router.weight") or (name.endswith(".mlp.shared_gate.weight") and case.system.sequence)


def _activation(case: Case, strategy: Strategy, module: str) -> Placement | None:
    if not module.endswith(".mlp.router"):
        return strategy.activation(case, module)
    place = strategy.activation(case, module.removesuffix(".router"))
    if place is None:
        return None
    own = () if case.system.sequence else (Cut(axis="tp", dim=1),)
    return replace(place, shape=(*place.shape[:2], case.experts), cuts=(*place.cuts, *own))


def _block(
    case: Case,
    strategy: Strategy,
    parts: Parts,
    mesh: Mesh,
    places: dict[str, Placement],
    device: torch.device,
    name: str,
    _dropout: Dropout,
) -> nn.Module:
    plain = case.but(fuse_mlp=False) if case.fuse_mlp else case
    linears = {leaf: parts.linear(f"{name}.shared.{leaf}") for leaf in mlp_linears(plain)} if case.shared_ffn else {}
    shared = Mlp(case.activation, linears) if linears else None
    return ExpertBlock(
        case, mesh, places, device, name, sequence_dim=strategy.sequence_dim, shared=shared, terms=parts.terms
    )


def _choices(rank: Rank, step: int) -> Mapping[str, Value]:
    """The experts that every token went to in a step: int32 [dp*micro*rows, seq, experts] by layer."""
    case, found = rank.case, dict[str, Value]()
    for name, block in blocks_of(rank).items():
        place, boxes = rank.strategy.activation(case, f"{name}.router"), list[Box]()
        assert place is not None
        for micro, chosen in block.chosen.items():
            first = (rank.mesh.axis("dp").rank * case.micro + micro) * case.rows
            own = rank.boxes(rank.strategy.laid_out(chosen).int(), place)
            boxes += rows(own, first=first, total=case.dp * case.micro * case.rows)
        found[f"routing/{step}/{name}"] = tuple(boxes)
        if case.bias_rate:
            found[f"value_after/{step}/{name}.router.bias"] = (whole(block.router.bias.clone()),)
    return found
