"""Experts as a scheme: what the words of `reference.features.experts` replace of a strategy.

    replaced     | by
    parts        | a block of experts in place of an MLP
    placements   | experts over ep, their inner features over etp
    partial      | gradients of the router, and if hidden states are split of the shared gate, are sums over own tokens
    activation   | the router's logits are those of these tokens
    data         | gradients of experts have the tokens of all etp*ep ranks already, and are summed over edp
    norm         | squares of experts' gradients are summed over etp and ep, so that each part counts once
    rows, step   | the calls of the dispatcher; the choices as `routing/<step>/<module>`

A gradient is a sum over tokens, divided once by the number of all tokens. So it needs no factor for the numbers of
ranks (experts.md 21.6).

With `bias_rate` the bias of every expert moves once a step, so that all experts get as many tokens, without a loss. It
follows from the rows of all micro-batches: one all_reduce of int64 [layers of the rank, E] over tp_cp_dp. These are the
rows that experts took, without the zeros that fill them up. They are integers because bfloat16 counts exactly only to
256 (experts.md 21.2, X8). Every choice counts once, also when a layer is recomputed. Source: arXiv:2408.15664;
Megatron-Core 0.16.1 `_update_router_expert_bias`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from shardproof.parallel.communication.collectives import all_reduce
from shardproof.parallel.communication.expectation import ONCE_A_STEP, CallPlace, CallRow
from shardproof.parallel.communication.layout import Box, Cut, Mesh, Placement, rows, whole_box
from shardproof.parallel.communication.schedules import stages_by_rank
from shardproof.parallel.experts.block import ExpertBlock, blocks_of
from shardproof.parallel.experts.counts import rows_of_experts
from shardproof.parallel.layers.block import Mlp, wide
from shardproof.parallel.layers.randomness import Dropout
from shardproof.parallel.layers.roles import mlp_linears
from shardproof.parallel.model.strategy import Parts, Rank, Step, Strategy, Value
from shardproof.parallel.training import norm, sum_gradients
from shardproof.reference.case import Case
from shardproof.reference.model.parameters import dtype_of


def _layers_of_ranks(case: Case) -> Iterator[CallPlace]:
    for own in stages_by_rank(case):
        layers = [block for block in case.layers_with_experts if any(stage.holds(block) for stage in own)]
        if layers:
            yield CallPlace(at=own[0].at, values={"layers_here": len(layers)})


BIASES = (
    CallRow(
        _layers_of_ranks,
        "grad_sync",
        "all_reduce",
        "layers_here * experts",
        "rows of every expert in a step",
        axis="tp_cp_dp",
        dtype="int64",
        times=ONCE_A_STEP,
    ),
)
"""The call that sums every expert's rows over all ranks with other tokens."""


def move_biases(rank: Rank) -> None:
    """Raise the bias of experts with fewer rows than the mean and lower that of those with more, by `bias_rate`."""
    blocks = list(blocks_of(rank).values())
    if not blocks:
        return
    rows = torch.stack([torch.stack([one.sum((0, 1)) for one in block.chosen.values()]).sum(0) for block in blocks])
    for block, mine in zip(blocks, all_reduce(rows, rank.mesh.axis("tp_cp_dp")).double(), strict=True):
        block.router.bias += rank.case.bias_rate * (mine.mean() - mine).sign()


COPIES = "edp"
"""The mesh axis whose ranks hold the same part of the same experts."""


def over_copies(others: Callable[[Rank], None], rank: Rank) -> None:
    """Sum all gradients over the ranks with copies: those of experts in one flat call, the others by `others`."""
    others(rank.of(rank.case.data_axis))
    experts = rank.of(COPIES)
    sum_gradients(experts.step.partial(experts).values(), rank.mesh.axis(COPIES))


def norm_of_all(others: Callable[[Rank], Tensor], rank: Rank) -> Tensor:
    """The norm of all gradients; `others` gives the norm of the dense ones. A stage without experts makes the same
    calls.
    """
    dense, experts = rank.of(rank.case.data_axis), rank.of(COPIES)
    places = {**experts.updated_places, "": next(iter(dense.updated_places.values()))}
    nothing = torch.zeros((), device=rank.device)
    axes = [rank.mesh.axis(axis) for axis in rank.strategy.expert_data_axes[COPIES]]
    mine = norm({**experts.gradients(), "": nothing}, places, axes, wide(dtype_of(rank.case)))
    return torch.hypot(others(dense), mine)


AFTER = ("context", "pipeline")


def apply(strategy: Strategy, case: Case) -> Strategy:
    """The strategy with the experts of this case; unchanged if it has none."""
    if not case.experts:
        return strategy

    def placements(case: Case) -> dict[str, Placement]:
        return {name: _place_expert(name, place) for name, place in strategy.placements(case).items()}

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
        partial=lambda case, name: _partial(case, name) or (not _is_expert(name) and strategy.partial(case, name)),
        expert_data_axes={**strategy.expert_data_axes, COPIES: own},
        parts=parts,
        rows=(*strategy.rows, *rows_of_experts(case), *(BIASES if case.bias_rate else ())),
        step=step,
    )


def _place_expert(name: str, place: Placement) -> Placement:
    """The placement of an expert's parameter, split over ep by experts and over etp by inner features."""
    if not _is_expert(name):
        return place
    inner = 2 if name.endswith(".down.weight") else 1
    return replace(place, cuts=(*place.cuts, Cut(axis="ep"), Cut(axis="etp", dim=inner)))


def _is_expert(name: str) -> bool:
    """Whether this is an expert's parameter."""
    return ".mlp.experts." in name


def _partial(case: Case, name: str) -> bool:
    """Whether the gradient of this whole parameter holds only a tensor rank's own tokens."""
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
    """The experts that every token went to in a step: by layer, int32 [dp*micro*rows, seq, experts]."""
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
            found[f"value_after/{step}/{name}.router.bias"] = (whole_box(block.router.bias.clone()),)
    return found
