"""Tensor parallelism over the axis tp: the modes tp and tp-sp of Megatron, mtp, msp and fsp of InternEvo.

    mode   hidden states           a column linear              partial gradients of
    tp     [S, B, D], whole        -                            q/k norms: sums over this rank's heads
    tp-sp  [S, B, D], split on S   gathers again in backward    norms and row biases too: over this rank's tokens
    mtp    [B, S, D], whole        -                            as tp, summed one by one
    msp    [B, S, D], split on S   keeps its gathered input     as tp-sp, summed one by one, never averaged (G1)
    fsp    [B, S, D], split on S   gathers again in backward    as msp

Every column linear gathers by itself: w1 and w3 send the same tensor twice unless they are fused. Learned positions
meet the hidden states before the split, so their gradients are whole. InternEvo's modes split the token table along
hidden by default; gathered logits get the plain loss (decision H1).

Column linears hold rows of their weight (whole heads, or inner features), row linears hold columns. The vocabulary is
split by rows (padded, see `Case.padded_vocab`), or the token table by columns with embedding=hidden. Norms, learned
positions and row biases are whole on every rank. The modes differ in how hidden states lie between the linears: a
`Region`. `WHOLE` and `SPLIT` are the calls of a micro-batch where they are whole on every rank, and where they are
split along the sequence. Sources: arXiv:1909.08053, arXiv:2205.05198; Megatron-Core 0.14 with local layers (modes.md 2,
4.3); InternEvo (modes.md 2, 2.1, 3.3, 3.4, 3.7).
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardproof.parallel.communication.batch import DELIVERY
from shardproof.parallel.communication.expectation import ACTIVATION, CallRow, Places
from shardproof.parallel.communication.layout import Axis, Cut, Mesh, Placement, local_shape
from shardproof.parallel.layers.embedding import Head, HiddenEmbedding, VocabularyEmbedding
from shardproof.parallel.layers.linear import ColumnLinear, Region, RowLinear
from shardproof.parallel.layers.loss import LOGITS, vocabulary_cross_entropy
from shardproof.parallel.layers.recompute import SAVED
from shardproof.parallel.layers.roles import COLUMN_LINEARS, ROW_LINEARS, is_column, is_row
from shardproof.parallel.model.strategy import Parts, Strategy
from shardproof.reference.case import Case
from shardproof.reference.model.parameters import dtype_of, shapes

BEHIND_WEIGHTS = 'overlap and wgrad != "deferred"'
"""Whether the gradient of a column linear's input travels while the gradient of its weight is computed."""
_COLUMNS, _PARTIAL = 'embedding == "hidden"', 'embedding == "vocab"'
_LEARNED, _ROTARY = (f'{_PARTIAL} and positions == "{positions}"' for positions in ("learned", "rope"))


def _row(where: str | Places, phase: str, op: str, why: str, **formulas: Any) -> CallRow:
    """A row of the calls of one whole activation."""
    return CallRow(where, phase, op, ACTIVATION, why, **formulas)


_INPUT = "gradient of the input, partial on every rank"
_WIDTH = "slice_tokens * width"
"""Elements of the whole input of a column linear."""
COLUMNS = (CallRow(COLUMN_LINEARS, "backward", "all_reduce", _WIDTH, _INPUT, hidden=BEHIND_WEIGHTS),)
SPLIT_COLUMNS = (
    CallRow(COLUMN_LINEARS, "forward", "all_gather", _WIDTH, "split inputs"),
    CallRow(COLUMN_LINEARS, "backward", "reduce_scatter", _WIDTH, f"{_INPUT} -> split", hidden=BEHIND_WEIGHTS),
)
"""Calls of column linears where hidden states are whole, and where they are split along the sequence."""
WHOLE = (
    *DELIVERY,
    _row("embedding", "forward", "all_gather", "columns of hidden states", when=_COLUMNS),
    _row("embedding", "forward", "all_reduce", "partial: the token is a row of one rank", when=_PARTIAL),
    _row(ROW_LINEARS, "forward", "all_reduce", "partial outputs"),
    SAVED,
    *LOGITS,
    *COLUMNS,
    _row("head", "backward", "all_reduce", _INPUT, hidden=BEHIND_WEIGHTS),
)
SPLIT = (
    *DELIVERY,
    _row("embedding", "forward", "all_gather", "columns of hidden states", when=_COLUMNS),
    _row("embedding", "forward", "all_reduce", "partial, whole until positions are added", when=_LEARNED),
    _row("embedding", "forward", "reduce_scatter", "partial -> split", when=_ROTARY),
    *SPLIT_COLUMNS,
    _row(ROW_LINEARS, "forward", "reduce_scatter", "partial outputs -> split"),
    _row("head", "forward", "all_gather", "split inputs"),
    *LOGITS,
    _row("head", "backward", "reduce_scatter", f"{_INPUT} -> split", hidden=BEHIND_WEIGHTS),
    _row(ROW_LINEARS, "backward", "all_gather", "split gradients of outputs"),
    _row("embedding", "backward", "all_gather", "split gradients of outputs"),
)
GATHERED_AGAIN = tuple(
    CallRow(where, "backward", "all_gather", elements, "inputs again, of which a slice was saved", hidden="overlap")
    for where, elements in ((COLUMN_LINEARS, _WIDTH), ("head", ACTIVATION))
)
"""Calls that a column linear adds when it does not keep its gathered input."""


def placements(case: Case) -> dict[str, Placement]:
    """The placement of every parameter on the axis tp."""
    return {name: _placement(case, name, shape) for name, shape in shapes(case).items()}


def _placement(case: Case, name: str, shape: tuple[int, ...]) -> Placement:
    module, _, leaf = name.rpartition(".")
    if module == "embedding.tokens" and case.embedding == "hidden":
        return Placement(shape=shape, cuts=(Cut(axis="tp", dim=1),))
    if module in ("embedding.tokens", "head"):
        return Placement(shape=shape, cuts=(Cut(axis="tp", blocks=(case.padded_vocab,)),))
    if is_column(module):
        return Placement(shape=shape, cuts=(_output_cut(case, module),))
    if is_row(module) and leaf == "weight":
        return Placement(shape=shape, cuts=(Cut(axis="tp", dim=1, unit=_unit(case, module)),))
    return Placement(shape=shape)


def _output_cut(case: Case, module: str, *, dim: int = 0) -> Cut:
    """The cut of a column linear's output features."""
    return Cut(axis="tp", dim=dim, blocks=_blocks(case, module), unit=_unit(case, module))


def _blocks(case: Case, module: str) -> tuple[int, ...]:
    """Sub-parameters of a column linear along its output features: w13 is w1, then w3."""
    return (case.ffn, case.ffn) if module.endswith(".w13") else ()


def _unit(case: Case, module: str) -> int:
    """The features that one kv group has in a linear of attention: no cut may fall inside a group."""
    group, key, value = case.heads // case.kv_heads, case.head_dim, case.value_dim
    units = {
        "wqkv": (group + 1) * key + value,
        "wq": group * key,
        "wk": key,
        "wv": value,
        "wo": group * value,
        "wuq": key,
        "wukv": key - case.rotated_dim + value,
    }
    return units.get(module.rpartition(".")[2], 1)


def activation(case: Case, module: str, *, sequence_split: bool) -> Placement | None:
    """The placement of a module's output [rows of a data rank, seq, width] on tp; None for a module unknown here."""
    rows, length = case.rows, case.row_tokens
    leaf = module.rpartition(".")[2]
    if is_column(module):
        width = shapes(case)[f"{module}.weight"][0]
        return Placement(shape=(rows, length, width), cuts=(_output_cut(case, module, dim=2),))
    if leaf in ("q_norm", "k_norm"):
        width = (case.heads if leaf == "q_norm" else case.kv_heads) * case.head_dim
        return Placement(shape=(rows, length, width), cuts=(Cut(axis="tp", dim=2),))
    if module == "head":
        shape = (rows, length, case.vocab)
        if case.head == "gather":
            return Placement(shape=shape)
        return Placement(shape=shape, cuts=(Cut(axis="tp", dim=2, blocks=(case.padded_vocab,)),))
    block = module in case.blocks or leaf in ("attention", "mlp", "wo", "w2")
    if block or module == "embedding" or leaf in ("attention_norm", "mlp_norm", "final_norm"):
        return Placement(shape=(rows, length, case.hidden), cuts=(Cut(axis="tp", dim=1),) if sequence_split else ())
    return None


def head_partial(_case: Case, name: str) -> bool:
    """Whether the gradient of this whole parameter is a sum over heads: for q/k norms, in every layout."""
    return name.rpartition(".")[0].rpartition(".")[2] in ("q_norm", "k_norm")


def sequence_partial(_case: Case, name: str) -> bool:
    """Whether the gradient of this whole parameter is a sum over a rank's own tokens or heads: norms, row biases.

    Learned positions are not partial. They meet the hidden states before the split, and the all-gather in the backward
    of the split gives every rank the whole gradient.
    """
    module, _, leaf = name.rpartition(".")
    return module.rpartition(".")[2].endswith("norm") or (is_row(module) and leaf == "bias")


def parts(
    case: Case,
    mesh: Mesh,
    device: torch.device,
    *,
    sequence_dim: int,
    sequence_split: bool,
    keep: bool = False,
    places: Mapping[str, Placement] | None = None,
) -> Parts:
    """The modules, the loss and the other parts of one tensor-parallel mode on one rank (`keep`: see `Region`).

    `places` of the parameters are those of `placements` unless given.
    """
    axis = mesh.axis("tp")
    region = Region(axis=axis, sequence_dim=sequence_dim if sequence_split else None, keep=keep, overlap=case.overlap)
    lie, dtype = placements(case) if places is None else places, dtype_of(case)

    def local(name: str) -> tuple[int, ...]:
        return local_shape(lie[name], mesh.coordinates)

    def linear(name: str) -> nn.Module:
        kind = ColumnLinear if is_column(name) else RowLinear
        return kind(local(f"{name}.weight"), region, bias=case.bias, dtype=dtype, device=device)

    def embedding() -> nn.Module:
        learned = "embedding.positions.weight"
        kind = HiddenEmbedding if case.embedding == "hidden" else VocabularyEmbedding
        return kind(
            local("embedding.tokens.weight"),
            local(learned) if learned in lie else None,
            region,
            sequence_dim=sequence_dim,
            dtype=dtype,
            device=device,
        )

    def head() -> nn.Module:
        shape = None if case.tied else local("head.weight")
        gather = case.head == "gather"
        return Head(shape, region, vocab=case.vocab, gather_output=gather, dtype=dtype, device=device)

    # Gathered logits are no shard: their loss is the plain one, on an axis of this rank alone (decision H1).
    loss_axis = axis if case.head == "parallel" else Axis(name="", ranks=(mesh.rank,), rank=0, group=None)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return vocabulary_cross_entropy(
            logits,
            labels,
            loss_axis,
            vocab=case.vocab,
            smoothing=case.label_smoothing,
            fused=case.cross_entropy == "fused",
        )

    saved_over = axis if case.distribute_saved else None
    return Parts(linear=linear, embedding=embedding, head=head, loss=loss, saved_over=saved_over)


def _strategy(
    name: str, *, sequence_dim: int, sequence_split: bool, keep: bool = False, coalesced: bool = False
) -> Strategy:
    """The strategy of one of these modes: how hidden states lie, whether a column linear keeps its gathered input."""
    again = () if keep else GATHERED_AGAIN
    return Strategy(
        name=name,
        sequence_dim=sequence_dim,
        placements=placements,
        activation=partial(activation, sequence_split=sequence_split),
        partial=sequence_partial if sequence_split else head_partial,
        coalesced=coalesced,
        parts=partial(parts, sequence_dim=sequence_dim, sequence_split=sequence_split, keep=keep),
        rows=(*SPLIT, *again) if sequence_split else WHOLE,
    )


TP = _strategy("tp", sequence_dim=0, sequence_split=False, coalesced=True)
TP_SP = _strategy("tp-sp", sequence_dim=0, sequence_split=True, coalesced=True)
MTP = _strategy("mtp", sequence_dim=1, sequence_split=False)
MSP = _strategy("msp", sequence_dim=1, sequence_split=True, keep=True)
FSP = _strategy("fsp", sequence_dim=1, sequence_split=True)
