"""isp: InternEvo's weight parallelism with split sequences. Hidden states are [B, S, D].

Over `tp` the sequence of one data rank is split: every rank keeps its own tokens from embedding to head. Over `wp` the
weights are split, and gathered whole for each use. wp divides tp * dp and may be smaller or larger than tp. A group of
wp may hold ranks of several data ranks, or a part of one. The size of wp changes no result: no two ranks see the same
token, and every gradient is a sum over all ranks. A shard's gradient is reduce-scattered over wp in backward, then
summed over wdp, whose ranks hold the same shard. A whole parameter's is summed over wdp, then over wp. All tp ranks
know a token's loss, and its gradient flows back once: see `_loss` and `parallel.communication.pairs`.

The gathers of a block are counted in the linear that starts them: the one that needs them, or with prefetch another
(the table of `parallel.layers.prefetch`). Nothing is gathered ahead for another stage of a pipeline. Reduce-scatters
are counted in their linear, fused ones in the first of their block. Recompute and backward share one gather where it is
prefetched or fused, except those of tables. Source: InternEvo (modes.md 2, 3.3 to 3.7; its means are sums here,
decision G2). With head=local per-token losses are gathered, as in InternEvo, so every rank has those of all tokens.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from shardproof.parallel.communication import pairs
from shardproof.parallel.communication.batch import DELIVERY, Delivered
from shardproof.parallel.communication.collectives import own_slice
from shardproof.parallel.communication.expectation import STAGES, CallPlace, CallRow, Places
from shardproof.parallel.communication.layout import Axis, Cut, Mesh, Placement, local_shape
from shardproof.parallel.communication.schedules import recomputed_layers, stages, stages_at
from shardproof.parallel.layers.attention import by_all_to_all
from shardproof.parallel.layers.loss import LOSS, vocabulary_cross_entropy
from shardproof.parallel.layers.prefetch import Gathers, PrefetchPlan
from shardproof.parallel.layers.roles import ATTENTION, is_column, is_row, linears
from shardproof.parallel.layers.weight_parallel import WeightEmbedding, WeightHead, WeightLinear
from shardproof.parallel.model.strategy import Parts, Strategy
from shardproof.reference.case import Case
from shardproof.reference.model.parameters import Shape, dtype_of, shapes

_SEQUENCE = 1
"""Dim of the sequence in tokens, hidden states and logits."""
_TABLES = ("embedding.tokens", "head")
"""Modules whose weights have a row for every token of the padded vocabulary."""


def placements(case: Case) -> dict[str, Placement]:
    """The placement of every parameter on the axis wp. Linears are cut into plain rows, since every rank gathers them
    whole.
    """
    return {name: _placement(case, name, shape) for name, shape in shapes(case).items()}


def _placement(case: Case, name: str, shape: tuple[int, ...]) -> Placement:
    module = name.rpartition(".")[0]
    if module == "embedding.tokens" and case.embedding == "hidden":
        return Placement(shape=shape, cuts=(Cut(axis="wp", dim=1),))
    if not _is_split(module):
        return Placement(shape=shape)
    blocks = (case.padded_vocab,) if module in _TABLES else ()
    return Placement(shape=shape, cuts=(Cut(axis="wp", blocks=blocks),))


def _is_split(module: str) -> bool:
    return module in _TABLES or is_column(module) or is_row(module)


def activation(case: Case, module: str) -> Placement | None:
    """The placement of a module's output [rows of a data rank, seq, width]; None for a module unknown here.

    Everything is split along the sequence over tp, except logits that were exchanged or gathered.
    """
    rows, length = case.rows, case.row_tokens
    split = Cut(axis="tp", dim=_SEQUENCE)
    if module == "head":
        shape = (rows, length, case.vocab)
        match case.head:
            case "exchange":
                return Placement(shape=shape, cuts=(Cut(axis="tp", dim=2, blocks=(case.padded_vocab,)),))
            case "gather":
                return Placement(shape=shape)
        return Placement(shape=shape, cuts=(split,))
    width = _width(case, module)
    return None if width is None else Placement(shape=(rows, length, width), cuts=(split,))


def _width(case: Case, module: str) -> int | None:
    """The features of an output, those of all heads together."""
    leaf = module.rpartition(".")[2]
    if is_column(module) or is_row(module):
        return shapes(case)[f"{module}.weight"][0]
    if leaf in ("q_norm", "k_norm"):
        return (case.heads if leaf == "q_norm" else case.kv_heads) * case.head_dim
    block = module.startswith("layers.") and (leaf.isdigit() or leaf in ("attention", "mlp"))
    if block or leaf in ("embedding", "attention_norm", "mlp_norm", "final_norm"):
        return case.hidden
    return None


def is_partial(case: Case, name: str) -> bool:
    """Whether the gradient is a partial sum: that of every whole parameter is, as each rank sees its own tokens."""
    return not _is_split(name.rpartition(".")[0])


def parts(case: Case, mesh: Mesh, device: torch.device) -> Parts:
    """The modules, the loss and the other parts of the mode on one rank."""
    sequence, weights = mesh.axis("tp"), mesh.axis("wp")
    places, dtype = placements(case), dtype_of(case)
    plan = PrefetchPlan(ahead=case.overlap, fused=case.fuse_weights, again=recomputed_layers(case))
    own_stages = stages_at(case, mesh.coordinates)
    by_layer = {layer: one for stage in own_stages for one in [Gathers(weights, plan)] for layer in stage.layers}

    def own(name: str) -> tuple[int, ...] | None:
        return local_shape(places[name], mesh.coordinates) if name in places else None

    def linear(name: str) -> nn.Module:
        block, leaf = name.split(".")[1], name.rpartition(".")[2]
        shape = local_shape(places[f"{name}.weight"], mesh.coordinates)
        gathers = by_layer[int(block)]
        return WeightLinear(shape, gathers, block=int(block), leaf=leaf, bias=case.bias, dtype=dtype, device=device)

    def embedding() -> nn.Module:
        place = places["embedding.tokens.weight"]
        tokens, positions = local_shape(place, mesh.coordinates), own("embedding.positions.weight")
        return WeightEmbedding(
            tokens, positions, weights, dim=1 if case.embedding == "hidden" else 0, dtype=dtype, device=device
        )

    def head() -> nn.Module:
        return WeightHead(
            own("head.weight"), weights, sequence, form=case.head, vocab=case.vocab, dtype=dtype, device=device
        )

    def local(batch: Delivered) -> Delivered:
        """This rank's tokens and their positions; labels, loss mask and borders stay whole."""
        tokens, positions = (own_slice(x, sequence, dim=_SEQUENCE) for x in (batch.tokens, batch.positions))
        return dataclasses.replace(batch, tokens=tokens, positions=positions)

    return Parts(
        linear=linear,
        embedding=embedding,
        head=head,
        loss=partial(_loss, case, sequence, mesh.rank),
        exchange=by_all_to_all(sequence),
        local=local,
    )


def _loss(case: Case, sequence: Axis, rank: int, logits: Tensor, labels_BS: Tensor) -> Tensor:
    """Every token's loss [B, S]; labels are whole under every form of the head.

    With head=exchange the loss is vocabulary-parallel. With head=gather each rank computes the loss of all tokens. With
    head=local each rank computes that of its own tokens, and an all-gather joins them (backward: own slice).
    """
    alone = Axis(name="", ranks=(rank,), rank=0, group=None)
    labels = own_slice(labels_BS, sequence, dim=_SEQUENCE) if case.head == "local" else labels_BS
    losses = vocabulary_cross_entropy(
        logits,
        labels,
        sequence if case.head == "exchange" else alone,
        vocab=case.vocab,
        smoothing=case.label_smoothing,
        fused=case.cross_entropy == "fused",
    )
    if case.head != "local":
        return losses
    return pairs.gather_from_sequence(losses, sequence, dim=_SEQUENCE, tensor_parallel_output_grad=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gather:
    """A gather of block weights: its elements, the linear that owns them, and the linears that start it in forward and
    backward.

    `ahead` says for forward and backward whether a matrix product lies between issue and use, `again` whether its block
    is recomputed.
    """

    elements: int
    owner: str
    starts: tuple[str, str]
    ahead: tuple[bool, bool]
    again: bool


def _gathers(case: Case, layers: Sequence[int], full: dict[str, Shape]) -> Iterator[_Gather]:
    """The gathers of these consecutive layers, all those of one stage. Every stage gathers as a whole model would."""
    blocks = {layer: [linear for linear in linears(case) if linear.startswith(f"layers.{layer}.")] for layer in layers}
    order, first, last, recomputed = (
        [*itertools.chain(*blocks.values())],
        layers[0],
        layers[-1],
        recomputed_layers(case),
    )
    following = dict(zip(order, [*order[1:], order[-1]], strict=True))
    for layer, own in blocks.items():
        again = layer in recomputed
        by_block = case.fuse_weights or (case.overlap and again)
        before = f"layers.{layer - 1}.attention.wo" if layer > first else own[0]
        later = blocks[min(layer + 1, last)] if case.overlap else own
        sizes = {
            linear: [math.prod(full[name]) for name in (f"{linear}.weight", f"{linear}.bias") if name in full]
            for linear in own
        }
        if case.fuse_weights:
            sizes = {own[0]: [sum(itertools.chain(*sizes.values()))]}
        for linear, elements in sizes.items():
            one_by_one = following[linear] if case.overlap else linear
            starts = before if case.overlap else linear, later[-1] if by_block else one_by_one
            # The first linear of a block that started all of its gathers waits before anything is computed.
            at_once = linear != own[0]
            ahead = layer > first or at_once, not again or layer < last or at_once
            for size in elements:
                yield _Gather(
                    elements=size,
                    owner=linear,
                    starts=starts,
                    ahead=(case.overlap and ahead[0], case.overlap and ahead[1]),
                    again=again,
                )


def _weights(case: Case, start: int | None = None) -> Iterator[CallPlace]:
    """The calls for weights of blocks, in the linears that start them in forward (0) or backward (1), or in their own
    linears.
    """
    full = shapes(case)
    for stage in stages(case):
        for one in _gathers(case, stage.layers, full):
            values = {"weights": one.elements, "again": one.again, "ahead": start is not None and one.ahead[start]}
            yield CallPlace(module=one.owner if start is None else one.starts[start], at=stage.at, values=values)


def _table(module: str, elements: str, *, hidden: str = "False") -> tuple[CallRow, ...]:
    """A table that its module gathers itself."""
    return (
        CallRow(module, "forward", "all_gather", elements, "the whole table", axis="wp"),
        CallRow(module, "backward", "all_gather", elements, "the whole table", axis="wp", hidden=hidden),
        CallRow(module, "backward", "reduce_scatter", elements, "gradient of the table", axis="wp", hidden=hidden),
    )


def _block(where: Places, phase: str, op: str, why: str, *, hidden: str = "False", when: str = "True") -> CallRow:
    return CallRow(where, phase, op, "weights", why, axis="wp", hidden=hidden, when=when, again="")


_SHARED = "overlap or fuse_weights"
_QUERIES = "slice_tokens // tp * heads * head_dim"
_KEYS = "slice_tokens // tp * 2 * max(kv_heads, tp) * head_dim"
_LOGITS = "slice_tokens // tp * padded_vocab"
_BOTH, _OWN = "forward backward", 'last and head == "local"'
_ROWS = (
    *DELIVERY,
    *_table("embedding", 'hidden * (padded_vocab if embedding == "vocab" else vocab)'),
    _block(partial(_weights, start=0), "forward", "all_gather", "whole weights, or biases", hidden="ahead"),
    _block(partial(_weights, start=1), "backward", "all_gather", "whole weights, or biases", hidden="ahead"),
    _block(_weights, "backward", "reduce_scatter", "their gradients", hidden="overlap and not fuse_weights"),
    _block(_weights, "recompute", "all_gather", "whole weights, or biases", when=f"again and not ({_SHARED})"),
    CallRow(ATTENTION, _BOTH, "all_to_all", _QUERIES, "tokens of queries for heads"),
    CallRow(ATTENTION, _BOTH, "all_to_all", _KEYS, "tokens of keys and values for heads"),
    CallRow(ATTENTION, _BOTH, "all_to_all", _QUERIES, "heads of the context for tokens"),
    *_table("head", "hidden * padded_vocab", hidden="overlap"),
    CallRow("head", _BOTH, "all_to_all", _LOGITS, "tokens of logits for columns", when='head == "exchange"'),
    *LOSS,
    CallRow("head", "forward", "all_gather", "slice_tokens * vocab", "logits of all tokens", when='head == "gather"'),
    CallRow(STAGES, "loss", "all_gather", "slice_tokens", "losses of all tokens", dtype="loss", when=_OWN),
)


ISP = Strategy(
    name="isp",
    sequence_dim=1,
    placements=placements,
    activation=activation,
    partial=is_partial,
    coalesced=False,
    parts=parts,
    rows=_ROWS,
    weight_axis="wp",
    data_axes=("wdp",),
    loss_axes=("dp",),
)
