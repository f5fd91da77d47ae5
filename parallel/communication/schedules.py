"""A pipeline: how many ranks, chunks and micro-batches under which schedule, and the program of each rank.

A *virtual stage* is one chunk of layers; virtual stages are numbered in the order in which a micro-batch passes them.
Rank r holds the stages r, r+pp, r+2pp, ..: stage k*pp + r is its chunk k.

Each rank computes by one rule: some warm-up forwards, then forward and backward in turn, then the remaining backwards.
The schedule decides the number of warm-up forwards. Sources: GPipe arXiv:1811.06965, 1F1B and interleaved
arXiv:2104.04473, Megatron-Core 0.16.1 `pipeline_parallel/schedules.py` (around.md 13.1, 13.2).

A program is a rank's computations with the messages between them. Each of its steps is one computation, or one batch of
messages that are issued together and waited for together. There are two forms, both Megatron-Core 0.16.1's
(`schedules.py`, `p2p_communication.py`; around.md 13.1, 13.2, 13.4):

plain        A tensor is received just before the computation that needs it, and sent just after the one that made it.
             After the warm-up a send and the next receive are one batch, if both are with the same neighbour.
interleaved  Each iteration (a forward, a forward and a backward, or a backward) ends with one batch, in the order
             send_prev, recv_prev, send_next, recv_next. The last rank sends activations to the first one for the next
             chunk, and the first rank sends gradients to the last one, iterations before they are needed.

A pipeline's stages are consecutive layers, the embedding on the first, final norm, head and loss on the last.

Names are those of the whole model: stage 1 of two holds `layers.2`, not a `layers.0` of its own. With tied embeddings,
or a module that embeds behind the decoder, the last stage holds a copy of the token table under the table's name.
Without a pipeline the one stage is the whole model.

Which layers of a stage backward computes again, and in which units:

    recompute_method=uniform    all layers, in units of recompute_layers; a unit saves its input alone
    recompute_method=block      the first recompute_layers layers of every stage, each a unit; the others save all

Sources: Megatron-Core 0.16.1 `transformer_layer.py`: get_transformer_layer_offset, `parallel_state.py` (around.md
13.5), `TransformerBlock._checkpointed_forward` (around.md 16); InternEvo recomputes the first layers, too
(`model.checkpoint`, a share of them).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from shardproof.reference.case import Case
from shardproof.reference.language.groups import PipelineGroup


class Kind(StrEnum):
    """Kinds of work of a rank: computations (forward, backward) and messages."""

    F = "F"
    B = "B"
    SEND_FORWARD = "send_forward"
    RECV_FORWARD = "recv_forward"
    SEND_BACKWARD = "send_backward"
    RECV_BACKWARD = "recv_backward"


class Action(NamedTuple):
    """A computation or message of a rank; `stage` is the virtual stage that computes, sends or receives."""

    kind: Kind
    micro: int
    chunk: int
    stage: int

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.micro} on stage {self.stage}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The shape of a pipeline that its schedule can run (rules: `reference.features.pipeline`).

    `group` is the number of micro-batches in a row per chunk (Megatron's microbatch_group_size_per_vp_stage, by
    default pp); only the interleaved schedule has it.
    """

    schedule: str
    ranks: int
    micro: int
    chunks: int = 1
    group: int | None = None

    @property
    def in_a_row(self) -> int:
        """Micro-batches in a row per chunk."""
        return self.ranks if self.group is None else self.group

    @property
    def virtual_stages(self) -> int:
        """Virtual stages on all ranks together."""
        return self.ranks * self.chunks

    def stage(self, rank: int, chunk: int) -> int:
        """The virtual stage that is chunk number `chunk` of a rank."""
        return chunk * self.ranks + rank

    def rank(self, stage: int) -> int:
        """The rank that holds a virtual stage."""
        return stage % self.ranks

    def at(self, kind: Kind, micro: int, stage: int) -> Action:
        """The action of a virtual stage."""
        return Action(kind, micro, stage // self.ranks, stage)

    def action(self, kind: Kind, rank: int, chunk: int, micro: int) -> Action:
        """The action of one of a rank's chunks."""
        return Action(kind, micro, chunk, self.stage(rank, chunk))


def warm_up(pipeline: Pipeline, rank: int) -> int:
    """The number of a rank's forwards that come before its steady phase of forward and backward in turn."""
    micro, after = pipeline.micro, pipeline.ranks - 1 - rank
    match pipeline.schedule:
        case "gpipe":
            return micro
        case "interleaved":
            return min(2 * after + (pipeline.chunks - 1) * pipeline.in_a_row, micro * pipeline.chunks)
        case _:
            return min(after, micro)


def forward_table(pipeline: Pipeline) -> tuple[tuple[int, int], ...]:
    """(chunk, micro-batch) of all forwards of any rank, in order."""
    group = pipeline.in_a_row if pipeline.chunks > 1 else pipeline.micro
    return tuple(
        (chunk, micro)
        for first in range(0, pipeline.micro, group)
        for chunk in range(pipeline.chunks)
        for micro in range(first, min(first + group, pipeline.micro))
    )


def backward_table(pipeline: Pipeline) -> tuple[tuple[int, int], ...]:
    """The (chunk, micro-batch) of all backwards of any rank, in order: the last chunk comes first."""
    return tuple((pipeline.chunks - 1 - chunk, micro) for chunk, micro in forward_table(pipeline))


def order(pipeline: Pipeline, rank: int) -> tuple[Action, ...]:
    """All computations of a rank in one step of training, in order."""
    warm = warm_up(pipeline, rank)
    forwards = [pipeline.action(Kind.F, rank, *place) for place in forward_table(pipeline)]
    backwards = [pipeline.action(Kind.B, rank, *place) for place in backward_table(pipeline)]
    steady = chain.from_iterable(zip(forwards[warm:], backwards, strict=False))
    return (*forwards[:warm], *steady, *backwards[len(forwards) - warm :])


def bubble_closed_form(pipeline: Pipeline) -> Fraction | None:
    """The closed form of the share of all ranks' time in which they compute nothing; None if none is known.

    Stages take equal times, and messages take none. GPipe, 1F1B: (pp-1)/(micro+pp-1), arXiv:2104.04473 section 2.2.1.
    Interleaved, group=pp and micro a multiple of pp: (pp-1)/(chunks micro+pp-1), section 2.2.2.
    """
    pp, micro = pipeline.ranks, pipeline.micro
    if pipeline.schedule == "interleaved" and (pipeline.in_a_row != pp or micro % pp):
        return None
    return Fraction(pp - 1, pipeline.chunks * micro + pp - 1)


Program = tuple[tuple[Action, ...], ...]
"""Steps in order. The actions of one step are issued together."""

_DOWN = {Kind.SEND_FORWARD: 1, Kind.RECV_BACKWARD: 1, Kind.RECV_FORWARD: -1, Kind.SEND_BACKWARD: -1}
"""Message -> the distance to the virtual stage at its other end."""
_OTHER = {
    Kind.SEND_FORWARD: Kind.RECV_FORWARD,
    Kind.RECV_FORWARD: Kind.SEND_FORWARD,
    Kind.SEND_BACKWARD: Kind.RECV_BACKWARD,
    Kind.RECV_BACKWARD: Kind.SEND_BACKWARD,
}
_JOINED = ((Kind.SEND_FORWARD, Kind.RECV_BACKWARD), (Kind.SEND_BACKWARD, Kind.RECV_FORWARD))
_IN_A_BATCH = (Kind.SEND_BACKWARD, Kind.RECV_FORWARD, Kind.SEND_FORWARD, Kind.RECV_BACKWARD)


def counterpart(pipeline: Pipeline, message: Action) -> Action:
    """The other end of a message: the receive of a send, the send of a receive."""
    return pipeline.at(_OTHER[message.kind], message.micro, message.stage + _DOWN[message.kind])


def peer(pipeline: Pipeline, message: Action) -> int:
    """The rank at the other end of a message."""
    return pipeline.rank(message.stage + _DOWN[message.kind])


def program(pipeline: Pipeline, rank: int) -> Program:
    """The program of a rank in one step of training."""
    made = order(pipeline, rank)
    if pipeline.schedule == "interleaved":
        return _by_iteration(pipeline, rank, made)
    return _plain(pipeline, made, warm_up(pipeline, rank))


def programs(pipeline: Pipeline) -> tuple[Program, ...]:
    """The programs of all ranks."""
    return tuple(program(pipeline, rank) for rank in range(pipeline.ranks))


def groups_between(pipeline: Pipeline) -> int:
    """The number of process groups that carry messages: 2 where in one group messages would be taken for each other.

    That is so when interleaved on two ranks: one batch then has activations and gradients between the same two ranks
    (around.md 13.4).
    """
    return 2 if pipeline.schedule == "interleaved" and pipeline.ranks == 2 else 1


def _message(pipeline: Pipeline, kind: Kind, action: Action) -> tuple[Action, ...]:
    """The message of a computation. There is none at either end of the model, nor between two stages of one rank."""
    other = action.stage + _DOWN[kind]
    if not 0 <= other < pipeline.virtual_stages or pipeline.rank(other) == pipeline.rank(action.stage):
        return ()
    return (action._replace(kind=kind),)


def _plain(pipeline: Pipeline, made: Sequence[Action], warm: int) -> Program:
    steps: list[tuple[Action, ...]] = []
    forwards = 0
    for action in made:
        forward = action.kind is Kind.F
        forwards += forward
        for message in _message(pipeline, Kind.RECV_FORWARD if forward else Kind.RECV_BACKWARD, action):
            before = steps[-1] if steps else ()
            same = forwards > warm and len(before) == 1 and (before[0].kind, message.kind) in _JOINED
            if same and peer(pipeline, before[0]) == peer(pipeline, message):
                steps[-1] = (*before, message)
            else:
                steps.append((message,))
        steps.append((action,))
        sent = _message(pipeline, Kind.SEND_FORWARD if forward else Kind.SEND_BACKWARD, action)
        steps += [sent] * bool(sent)
    return tuple(steps)


def _by_iteration(pipeline: Pipeline, rank: int, made: Sequence[Action]) -> Program:
    warm, total = warm_up(pipeline, rank), len(made) // 2
    forwards = [action for action in made if action.kind is Kind.F]
    backwards = [action for action in made if action.kind is Kind.B]
    activations = dict(_due(pipeline, Kind.RECV_FORWARD, forwards, forward_table(pipeline)))
    gradients = dict(_due(pipeline, Kind.RECV_BACKWARD, backwards, backward_table(pipeline)))
    steps: list[tuple[Action, ...]] = [activations.get(-1, ())]
    for iteration in range(total + warm):
        batch: list[Action] = []
        if iteration < total:
            steps.append((forwards[iteration],))
            batch += _message(pipeline, Kind.SEND_FORWARD, forwards[iteration])
            batch += activations.get(iteration, ())
        if iteration >= warm:
            steps.append((backwards[iteration - warm],))
            batch += _message(pipeline, Kind.SEND_BACKWARD, backwards[iteration - warm])
        received = gradients.get(iteration - warm, ())
        alone = iteration == warm - 1 == total - 1  # without a steady phase the first gradient gets a batch of its own
        steps.append(
            tuple(sorted([*batch, *received * (not alone)], key=lambda message: _IN_A_BATCH.index(message.kind)))
        )
        steps.append(received * alone)
    return tuple(filter(None, steps))


def _due(
    pipeline: Pipeline, kind: Kind, needing: Sequence[Action], table: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, tuple[Action, ...]]]:
    """Pairs of the number of a forward (or backward) of this rank and the messages received after it; -1: at first.

    A neighbour runs one iteration ahead, so what it sends is received one iteration before it is needed. A message
    between the two ends of the pipeline is received pp-1 iterations after it was computed.
    """
    place = {where: index for index, where in enumerate(table)}
    due: defaultdict[int, tuple[Action, ...]] = defaultdict(tuple)
    for index, action in enumerate(needing):
        for message in _message(pipeline, kind, action):
            other = counterpart(pipeline, message)
            sent = place[other.chunk, other.micro]
            due[sent + pipeline.ranks - 1 if other.chunk != action.chunk else index - 1] += (message,)
    yield from due.items()


TABLE = "embedding.tokens.weight"
"""The parameter that the first stage holds, and the last one too if it reads it (`Stage.copies_table`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Stage `index` of `count` on `ranks` ranks, with its layers by number. With `reads_table` the last stage reads the
    token table: the head is tied, or a module behind the decoder embeds tokens.
    """

    index: int
    count: int
    ranks: int
    layers: range
    reads_table: bool

    @property
    def at(self) -> Mapping[str, int]:
        """The place of the stage's rank on the mesh, as a term has it; empty on one rank."""
        return {"pp": self.rank} if self.ranks > 1 else {}

    @property
    def rank(self) -> int:
        """The number of the stage's rank in the pipeline."""
        return self.index % self.ranks

    @property
    def chunk(self) -> int:
        """The number of this chunk on its rank."""
        return self.index // self.ranks

    @property
    def first(self) -> bool:
        """Whether the model begins here."""
        return self.index == 0

    @property
    def last(self) -> bool:
        """Whether the model ends here."""
        return self.index == self.count - 1

    @property
    def copies_table(self) -> bool:
        """Whether the stage holds a copy of the first stage's token table."""
        return self.last and not self.first and self.reads_table

    @property
    def shares_table(self) -> bool:
        """Whether the stage has a token table that another stage holds too."""
        return self.copies_table or (self.first and not self.last and self.reads_table)

    def holds(self, name: str) -> bool:
        """Whether the parameter or module of this dotted name is here."""
        first, number, *_ = [*name.split("."), ""]
        if first == "layers":
            return int(number) in self.layers
        if first == "embedding":
            return self.first or (self.copies_table and name.startswith(TABLE.removesuffix(".weight")))
        return self.last


@lru_cache(maxsize=16)
def stages(case: Case) -> tuple[Stage, ...]:
    """All stages of a case, in the order in which a micro-batch passes them."""
    return tuple(_stage(case, rank, chunk) for chunk in range(case.chunks) for rank in range(case.pp))


def stages_of_rank(case: Case, rank: int) -> tuple[Stage, ...]:
    """The stages of the rank at this place of a pipeline, chunk by chunk."""
    return stages(case)[rank :: case.pp]


def stages_by_rank(case: Case) -> tuple[tuple[Stage, ...], ...]:
    """The stages of every rank of a pipeline."""
    return tuple(stages_of_rank(case, rank) for rank in range(case.pp))


def stages_at(case: Case, at: Mapping[str, tuple[int, int]]) -> tuple[Stage, ...]:
    """The stages of the rank at these coordinates, mesh axis -> (place, ranks)."""
    return stages_of_rank(case, at["pp"][0])


def pipeline_of(case: Case) -> Pipeline:
    """The shape of the case's pipeline, as its schedule orders it."""
    return Pipeline(
        schedule=case.schedule, ranks=case.pp, micro=case.micro, chunks=case.chunks, group=case.group or None
    )


def _stage(case: Case, rank: int, chunk: int) -> Stage:
    group = PipelineGroup(ranks=tuple(range(case.pp)), chunks=case.chunks)
    layers = group.layers(case.layers, rank, chunk, first=case.first_layers or None, last=case.last_layers or None)
    return Stage(
        index=group.virtual_stage(rank, chunk),
        count=case.pp * case.chunks,
        ranks=case.pp,
        layers=layers,
        reads_table=case.tied or case.embeds_behind,
    )


def units(case: Case, layers: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The units of recomputation among these consecutive layers, which are all of a stage's, in order."""
    if not case.layers_again:
        return ()
    size = case.recompute_layers
    if case.recompute_method == "block":
        return tuple((layer,) for layer in layers[:size])
    return tuple(tuple(layers[first : first + size]) for first in range(0, len(layers), size))


def recomputed_layers(case: Case) -> frozenset[int]:
    """The numbers of all layers that are computed again, on whatever stage."""
    return frozenset(layer for stage in stages(case) for unit in units(case, stage.layers) for layer in unit)


def recomputed_modules(case: Case) -> tuple[str, ...]:
    """The modules that backward computes again: layers, and units behind the decoder."""
    return (
        *(f"layers.{layer}" for layer in recomputed_layers(case)),
        *(case.units_behind if case.layers_again else ()),
    )


def is_inside(module: str, units: Iterable[str]) -> bool:
    """Whether a module is one of these, or lies inside of one."""
    return any(f"{module}.".startswith(f"{unit}.") for unit in units)


def ends_of_units(case: Case) -> frozenset[int]:
    """The numbers of the last layers of all units."""
    return frozenset(unit[-1] for stage in stages(case) for unit in units(case, stage.layers))


def backward_order(case: Case, layers: Sequence[int]) -> tuple[int, ...]:
    """All layers of a stage in the order of backward; within a recomputed unit they run from the first layer on."""
    made = units(case, layers)
    rest = layers[sum(map(len, made)) :]
    return (*reversed(rest), *(layer for unit in reversed(made) for layer in unit))
