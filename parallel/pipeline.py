"""Pipeline parallelism: what the words `pp schedule chunks group first_layers last_layers` replace of a strategy.

Each stage holds consecutive layers, and activations travel from stage to stage. `CasePipeline` is the pipeline as
`predict` reads it: which stages are alike, what each does in a step.

A rank builds only what its stages hold. The last stage has the loss and the number of tokens, the others have 0, and
both are summed over the pipeline. So is the squared norm, in which a tied token table counts only on the first stage.
The table's gradient is summed over the first and the last stage once a step, after the sums over data ranks (around.md
18.2), so that both copies take the same steps.

A message is an activation or its gradient, in the case's dtype and the mode's layout, of the tokens on this rank.
Messages that are issued together are one batch of isend and irecv over the pipeline's group, and all of it is awaited
at once. A received activation is an empty tensor that requires a gradient; that gradient is sent back.

Interleaved stages on two ranks would send activations and gradients to the same rank in one batch, in which messages
are matched only by their order. So gradients have a group of their own there, which makes two batches (around.md 13.4).
Source: Megatron-Core 0.16.1 `schedules.py`, `p2p_communication.py` (around.md 13.1, 13.2, 13.4).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from shardproof.parallel.communication.expectation import ACTIVATION, STAGES, CallRow
from shardproof.parallel.communication.layout import Cut, Placement
from shardproof.parallel.communication.schedules import (
    TABLE,
    Action,
    Kind,
    Program,
    Stage,
    bubble_closed_form,
    groups_between,
    peer,
    pipeline_of,
    program,
    programs,
    stages_by_rank,
)
from shardproof.parallel.model.strategy import Rank, Scheduled, Step, Strategy
from shardproof.parallel.training import MicroBatches, sum_gradients
from shardproof.reference.case import Case
from shardproof.reference.model.parameters import dtype_of

BACK = "pp_back"
"""The mesh's name of the pipeline's group for gradients, if activations have another."""
_RECEIVED = (Kind.RECV_FORWARD, Kind.RECV_BACKWARD)
_BACK = (Kind.SEND_BACKWARD, Kind.RECV_BACKWARD)


def message_shape(case: Case, *, sequence_dim: int) -> tuple[int, ...]:
    """The shape of one activation on one rank, between two stages."""
    length = case.slice_tokens // case.rows // (case.tp if case.system.sequence else 1)
    return (length, case.rows, case.hidden) if sequence_dim == 0 else (case.rows, length, case.hidden)


def with_channels(rank: Rank) -> Rank:
    """The rank with a group for gradients in its mesh, if its schedule needs one; every rank must call this."""
    if groups_between(pipeline_of(rank.case)) == 1:
        return rank
    mesh, axis = rank.mesh, rank.mesh.axis("pp")
    made = {ranks: dist.new_group(list(ranks), group_desc="pp") for ranks in rank.case.axes["pp"]}
    return replace(rank, mesh=replace(mesh, axes={**mesh.axes, BACK: replace(axis, group=made[axis.ranks])}))


def as_scheduled(rank: Rank, step: int, by: "type[StageRun] | None" = None) -> Scheduled:
    """Run all micro-batches of a step in the order of the schedule; `by` may be a subclass of `StageRun`."""
    axis = rank.mesh.axis("pp")
    pipeline, run = pipeline_of(rank.case), (by or StageRun)(rank, step)
    for together in program(pipeline, axis.rank):
        kind, micro, chunk, stage = together[0]
        match kind:
            case Kind.F:
                run.outputs[micro, stage] = run.forward(micro, chunk, run.inputs.get((micro, stage)))
            case Kind.B:
                run.backward(together[0])
            case _:
                run.exchange(together, [axis.ranks[peer(pipeline, message)] for message in together])
    return run.sums


class StageRun(MicroBatches):
    """The micro-batches of a rank's stages. It keeps their inputs and outputs by micro-batch and stage."""

    def __init__(self, rank: Rank, step: int) -> None:
        super().__init__(rank, step)
        self.inputs: dict[tuple[int, int], Tensor] = {}
        self.outputs: dict[tuple[int, int], Tensor] = {}
        self._gradients: dict[tuple[int, int], Tensor] = {}

    def backward(self, action: Action) -> None:
        """Compute the gradients of a stage's parameters and input from the gradient of its output."""
        key = action.micro, action.stage
        torch.autograd.backward(self.outputs.pop(key), self._gradients.pop(key, None))

    def exchange(self, messages: Sequence[Action], peers: Sequence[int]) -> None:
        """Issue these messages, in one batch for each group, and wait for all of them. `peers` are the global ranks to
        which they go or from which they come.
        """
        axes = self.rank.mesh.axes
        batches: dict[str, list[dist.P2POp]] = {}
        for message, other in zip(messages, peers, strict=True):
            axis = BACK if BACK in axes and message.kind in _BACK else "pp"
            received = message.kind in _RECEIVED
            tensor = self._receive_buffer(message) if received else self._tensor_to_send(message)
            operation = dist.P2POp(dist.irecv if received else dist.isend, tensor, other, axes[axis].group)
            batches.setdefault(axis, []).append(operation)
        for work in [work for batch in batches.values() for work in dist.batch_isend_irecv(batch)]:
            work.wait()

    def _receive_buffer(self, message: Action) -> Tensor:
        """An empty tensor for a message, which is kept for the computation that needs it."""
        rank, forward = self.rank, message.kind is Kind.RECV_FORWARD
        shape = message_shape(rank.case, sequence_dim=rank.strategy.sequence_dim)
        tensor = torch.empty(shape, dtype=dtype_of(rank.case), device=rank.device, requires_grad=forward)
        (self.inputs if forward else self._gradients)[message.micro, message.stage] = tensor
        return tensor.detach()

    def _tensor_to_send(self, message: Action) -> Tensor:
        """The output of a forward, or the gradient of a backward's input."""
        key = message.micro, message.stage
        if message.kind is Kind.SEND_FORWARD:
            return self.outputs[key].detach().contiguous()
        gradient = self.inputs.pop(key).grad
        assert gradient is not None
        return gradient.contiguous()


def apply(strategy: Strategy, case: Case) -> Strategy:
    """The strategy with the stages of this case's pipeline; unchanged on one stage."""
    if not case.pipeline_axes:
        return strategy

    def placements(case: Case) -> dict[str, Placement]:
        ranks = stages_by_rank(case)
        return {name: _on_stages(place, ranks, name) for name, place in strategy.placements(case).items()}

    def step(case: Case, plain: Step) -> Step:
        before = strategy.step(case, plain)
        return replace(
            before,
            prepare=lambda rank: with_channels(before.prepare(rank)),
            schedule=as_scheduled,
            reductions={**before.reductions, **({"embedding": _over_embedding} if case.tied else {})}
            | ({"embedding": _over_embedding} if case.embeds_behind else {}),
        )

    return replace(
        strategy,
        placements=placements,
        loss_axes=(*strategy.loss_axes, "pp"),
        norm_axes=(*strategy.norm_axes, "pp"),
        rows=(*strategy.rows, *_messages(case)),
        step=step,
    )


def _messages(case: Case) -> Iterator[CallRow]:
    """The messages between stages: activations forward and gradients back, each rank's own part of them."""
    elements = "slice_tokens // tp * hidden" if case.system.sequence else ACTIVATION
    for op, when, why in (
        ("send", "not last", "activations to the next stage"),
        ("recv", "not last", "gradients from the next stage"),
        ("recv", "not first", "activations from the stage before"),
        ("send", "not first", "gradients to the stage before"),
    ):
        yield CallRow(STAGES, "pipeline", op, elements, why, axis="pp", when=when)


def _on_stages(place: Placement, ranks: Sequence[Sequence[Stage]], name: str) -> Placement:
    """The placement of a parameter with a further cut: only the ranks of a pipeline whose stages hold it have it."""
    whole = range(place.shape[0])
    parts = tuple((whole,) if any(stage.holds(name) for stage in own) else () for own in ranks)
    return replace(place, cuts=(Cut(axis="pp", held=parts), *place.cuts))


def _over_embedding(rank: Rank) -> None:
    """Sum the token table's gradient over the first and the last stage."""
    if "embedding" in rank.mesh.axes:
        sum_gradients([rank.step.partial(rank)[TABLE]], rank.mesh.axis("embedding"))


@dataclass(frozen=True, slots=True, kw_only=True)
class CasePipeline:
    """The pipeline of a case with several stages."""

    case: Case

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers of every rank, all chunks together."""
        return tuple(sum(len(stage.layers) for stage in own) for own in stages_by_rank(self.case))

    @property
    def chunks(self) -> int:
        """The number of chunks of layers on every rank."""
        return pipeline_of(self.case).chunks

    @property
    def alike(self) -> tuple[int, ...]:
        """For each rank, the first rank whose stages have the same kinds of layers and the same ends of the model."""
        ranks = stages_by_rank(self.case)
        kinds = [[(stage.first, stage.last, self._kinds(stage)) for stage in own] for own in ranks]
        return tuple(kinds.index(kind) for kind in kinds)

    def _kinds_of_ranks(self) -> list[set[tuple[str, ...]]]:
        return [{kind for stage in own for kind in self._kinds(stage)} for own in stages_by_rank(self.case)]

    def _kinds(self, stage: Stage) -> list[tuple[str, ...]]:
        """The kinds of branches that replace attention and MLP in each of its layers."""
        return [tuple(sorted(self.case.replaced_branches(layer).values())) for layer in stage.layers]

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs of all ranks in a step."""
        return programs(pipeline_of(self.case))

    @property
    def bubble_stated(self) -> float | None:
        """The closed form of the share of time in which stages wait, None if none is known."""
        stated = bubble_closed_form(pipeline_of(self.case))
        return None if stated is None else float(stated)

    def sample(self, depth: int | None) -> Case:
        """The case with one step of two or three micro-batches, or of whole groups of them when interleaved.

        Every chunk then has `depth` layers (None: as before), unless this changes which kinds of layers a rank has.
        """
        case, pipeline = self.case, pipeline_of(self.case)
        few, group = max(2, min(3, case.micro)), pipeline.in_a_row if self.chunks > 1 else 1
        short = {"steps": 1, "micro": -(-few // group) * group}
        if depth is None:
            return case.but(**short)
        each = depth * self.chunks
        ends = {"first_layers": each * bool(case.first_layers), "last_layers": each * bool(case.last_layers)}
        made = case.but(**short, **ends, layers=each * pipeline.ranks)
        return made if CasePipeline(case=made)._kinds_of_ranks() == self._kinds_of_ranks() else case.but(**short)
