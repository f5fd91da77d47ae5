"""autotp: DeepSpeed's automatic tensor parallelism. Hidden states [B, S, D] are whole on every rank of the axis tp, and
shares of heads and features may differ between ranks.

The embedding is whole and issues nothing, nor does a tied head that is gathered: it is whole too. The loss is the plain
one of whole logits. Gradients of q/k norms are sums over this rank's heads, added up once a step (DeepSpeed: in every
micro-batch). Forward under head=sum is DeepSpeed's inference; head=gather is its training.

A rank holds whole kv heads with their query heads (`parallel.slicing`), the first ranks one more. Inner features are
split nearly evenly, of OPT in proportion to the heads where they divide them. Embeddings, norms and row biases are
whole.

    head     | tied  | the head holds                 | logits
    gather   | false | rows of some tokens [V_i, D]   | gathered, the smaller parts padded
    gather   | true  | nothing: reads the whole table | whole, no call
    sum      | false | some columns [V, D_i]          | summed
    sum      | true  | nothing: reads table columns   | summed; in backward the table's gradient too

Source: DeepSpeed 0.19.8 `module_inject/auto_tp.py`, `tp_shard.py`, `layers.py`. The layers are LinearLayer,
LinearAllreduce, LmHeadLinearAllreduce (head=sum, inference) and LinearAllreduceWithReplicatedInput (its training);
modes.md 8.2, experts.md 27. A tied head that is gathered stays whole there as well. A tied head that is summed is
trained there with an embedding cut along hidden, and served with a whole one.
"""

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardproof.parallel.communication import pairs
from shardproof.parallel.communication.batch import DELIVERY
from shardproof.parallel.communication.expectation import ACTIVATION, CallPlace, CallRow
from shardproof.parallel.communication.layout import Axis, Cut, Mesh, Placement, local_shape
from shardproof.parallel.layers.embedding import WholeEmbedding
from shardproof.parallel.layers.linear import Region, column_linear
from shardproof.parallel.layers.loss import vocabulary_cross_entropy
from shardproof.parallel.layers.roles import COLUMN_LINEARS, ROW_LINEARS, is_column, is_row
from shardproof.parallel.model.strategy import Parts, Strategy
from shardproof.parallel.schemes import tensor
from shardproof.parallel.slicing.rows import (
    Heads,
    RowRanges,
    concat,
    consecutive,
    fused_rows,
    kv_rows,
    query_rows,
    shard_sizes,
    widths,
)
from shardproof.reference.case import Case
from shardproof.reference.model.parameters import dtype_of, shapes

_SEQUENCE_DIM = 1


def placements(case: Case) -> dict[str, Placement]:
    """The placement of every parameter on the axis tp."""
    return {name: _placement(case, name, shape) for name, shape in shapes(case).items()}


def _placement(case: Case, name: str, shape: tuple[int, ...]) -> Placement:
    module, _, leaf = name.rpartition(".")
    if module == "head":
        return Placement(shape=shape, cuts=(_cut_of(head_held(case), dim=0 if case.head == "gather" else 1),))
    if is_column(module):
        return Placement(shape=shape, cuts=(_cut_of(_ranges_of_module(case, module)),))
    if is_row(module) and leaf == "weight":
        return Placement(shape=shape, cuts=(_cut_of(_ranges_of_module(case, module), dim=1),))
    return Placement(shape=shape)


def _cut_of(held: RowRanges, *, dim: int = 0) -> Cut:
    return Cut(axis="tp", dim=dim, held=held)


def _heads(case: Case) -> Heads:
    """The heads of a case's attention."""
    return Heads(query=case.heads, kv=case.kv_heads, size=case.head_dim)


def _ranges_of_module(case: Case, module: str) -> RowRanges:
    """Parts of a column linear's output features, or of a row linear's input features, by rank."""
    heads = _heads(case)
    match module.rpartition(".")[2]:
        case "wqkv":
            return fused_rows(heads, case.tp, "groups")
        case "wq" | "wo":
            return query_rows(heads, case.tp)
        case "wk" | "wv":
            return kv_rows(heads, case.tp)
        case "w13":
            return concat(consecutive(_inner(case)), consecutive(_inner(case), first=case.ffn))
    return consecutive(_inner(case))


def _inner(case: Case) -> tuple[int, ...]:
    """The MLP's inner features of every rank, under the name of its linear in this family."""
    name = "fc1" if case.family == "opt" else "mlp.up_proj"
    return shard_sizes(case.ffn, case.tp, kv_heads=case.kv_heads, name=name)


def head_held(case: Case) -> RowRanges:
    """Parts of the head's tokens (head=gather) or of its input features (head=sum), by rank."""
    return consecutive(shard_sizes(case.vocab if case.head == "gather" else case.hidden, case.tp, name="lm_head"))


def activation(case: Case, module: str) -> Placement | None:
    """The placement of a module's output [rows of a data rank, seq, width] on tp; None for a module unknown here."""
    rows, length = case.rows, case.row_tokens
    leaf = module.rpartition(".")[2]
    if module == "head":
        return Placement(shape=(rows, length, case.vocab))
    if is_column(module):
        width = shapes(case)[f"{module}.weight"][0]
        return Placement(shape=(rows, length, width), cuts=(_cut_of(_ranges_of_module(case, module), dim=2),))
    if leaf in ("q_norm", "k_norm"):
        held = _ranges_of_module(case, "wq" if leaf == "q_norm" else "wk")
        return Placement(shape=(rows, length, sum(widths(held))), cuts=(_cut_of(held, dim=2),))
    return tensor.activation(case, module, sequence_split=False)


def shares(case: Case) -> Placement:
    """The placement of attention probabilities [rows of a data rank, heads, queries, keys]: by the ranks' heads."""
    rows, length = case.rows, case.row_tokens
    held = query_rows(dataclasses.replace(_heads(case), size=1), case.tp)
    return Placement(shape=(rows, case.heads, length, length), cuts=(_cut_of(held, dim=1),))


def parts(case: Case, mesh: Mesh, device: torch.device) -> Parts:
    """The modules, the loss and the other parts of the mode on one rank."""
    places, dtype = placements(case), dtype_of(case)
    shared = tensor.parts(case, mesh, device, sequence_dim=_SEQUENCE_DIM, sequence_split=False, places=places)
    axis = mesh.axis("tp")
    region = Region(axis=axis, overlap=case.overlap)

    def embedding() -> nn.Module:
        positions = places.get("embedding.positions.weight")
        return WholeEmbedding(
            places["embedding.tokens.weight"].shape,
            None if positions is None else positions.shape,
            region,
            sequence_dim=_SEQUENCE_DIM,
            dtype=dtype,
            device=device,
        )

    def head() -> nn.Module:
        shape = None if case.tied else local_shape(places["head.weight"], mesh.coordinates)
        kind = GatheredHead if case.head == "gather" else SummedHead
        return kind(shape, region, head_held(case), dtype=dtype, device=device)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        alone = Axis(name="", ranks=(mesh.rank,), rank=0, group=None)  # logits are whole: the plain loss
        return vocabulary_cross_entropy(logits, labels, alone, vocab=case.vocab, smoothing=case.label_smoothing)

    return dataclasses.replace(shared, embedding=embedding, head=head, loss=loss)


class _Head(nn.Module):
    """The fields of both heads: this rank's weight, None if the head is tied, and `held`, the parts of all ranks."""

    def __init__(
        self,
        shape: tuple[int, ...] | None,
        region: Region,
        held: RowRanges,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.region, self.held = region, held
        self.weight = None if shape is None else nn.Parameter(torch.empty(shape, dtype=dtype, device=device))


class GatheredHead(_Head):
    """Logits of this rank's tokens, gathered; a column linear. Tied: all logits, from the whole table on every rank."""

    def forward(self, x: Tensor, tied_weight: Tensor) -> Tensor:
        """Hidden states [.., .., D] -> logits [.., .., V] on every rank; a tied head reads `tied_weight` [V, D]."""
        if self.weight is None:
            return functional.linear(x, tied_weight)
        logits = column_linear(x, self.weight, None, self.region)
        return pairs.gather_parts(logits, self.region.axis, widths(self.held))


class SummedHead(_Head):
    """Partial logits of this rank's input features, summed; a row linear whose input is whole."""

    def forward(self, x: Tensor, tied_weight: Tensor) -> Tensor:
        """Hidden states [.., .., D] -> logits [.., .., V] on every rank; a tied head reads `tied_weight` [V, D]."""
        axis = self.region.axis
        own = self.held[axis.rank]
        weight = pairs.own_part(tied_weight, axis, own) if self.weight is None else self.weight
        return pairs.reduce_from(functional.linear(pairs.own_part(x, axis, own), weight), axis)


_SUMMED, _GATHERED = 'head == "sum"', 'head == "gather" and not tied'


def _widest(case: Case) -> Iterator[CallPlace]:
    """The head; `widest` is the largest number of vocabulary rows that a rank holds."""
    yield CallPlace(module="head", values={"widest": max(widths(head_held(case)))})


_ROWS = (
    *DELIVERY,
    CallRow(ROW_LINEARS, "forward", "all_reduce", ACTIVATION, "partial outputs"),
    CallRow(COLUMN_LINEARS, "backward", "all_reduce", ACTIVATION, "gradient of the input, partial", hidden="overlap"),
    CallRow("head", "forward", "all_reduce", "tokens * vocab", "partial logits", when=_SUMMED),
    CallRow("head", "backward", "all_reduce", ACTIVATION, "columns of the input's gradient", when=_SUMMED),
    CallRow("head", "backward", "all_reduce", "vocab * hidden", "columns of the table", when=f"{_SUMMED} and tied"),
    CallRow(_widest, "forward", "all_gather", "tokens * tp * widest", "parts, padded to the widest", when=_GATHERED),
    CallRow("head", "backward", "all_reduce", ACTIVATION, "gradient of input", when=_GATHERED, hidden="overlap"),
)
AUTOTP = Strategy(
    name="autotp",
    sequence_dim=_SEQUENCE_DIM,
    placements=placements,
    activation=activation,
    shares=shares,
    partial=tensor.head_partial,
    parts=parts,
    rows=_ROWS,
)
