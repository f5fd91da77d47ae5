"""Weight parallelism with split sequences: what the mode isp decides, bound to a case and a mesh.

Two axes over the same ranks. Over `tp` the sequence of one data rank is split: every rank keeps its own tokens from
embedding to head. Over `wp` the weights are split, and gathered whole for each use. wp divides tp * dp and may be
smaller or larger than tp. A group of wp may hold ranks of several data ranks, or a part of one. The size of wp changes
no result: no two ranks see the same token, and every gradient is a sum over all ranks. A shard's gradient is
reduce-scattered over wp in backward, then summed over wdp, whose ranks hold the same shard. A whole parameter's is
summed over wdp, then over wp. All tp ranks know a token's loss, and its gradient flows back once: see `_loss` and
`parallel.communication.pairs`. Source: InternEvo's isp (modes.md 3), with sums for its means (decision G2).
"""

import dataclasses
from functools import partial as partial_of

import torch
from torch import Tensor, nn

from shardproof.parallel.communication import pairs
from shardproof.parallel.communication.batch import Delivered
from shardproof.parallel.communication.collectives import own_slice
from shardproof.parallel.communication.layout import Cut, Placement, local_shape
from shardproof.parallel.communication.mesh import Axis, Mesh
from shardproof.parallel.layers.attention import by_all_to_all
from shardproof.parallel.layers.loss import vocabulary_cross_entropy
from shardproof.parallel.layers.prefetch import Gathers, PrefetchPlan
from shardproof.parallel.layers.roles import is_column, is_row
from shardproof.parallel.layers.weight_parallel import WeightEmbedding, WeightHead, WeightLinear
from shardproof.parallel.model.strategy import Parts
from shardproof.parallel.schedules.stages import computed_again, held_at
from shardproof.reference.case import Case
from shardproof.reference.model.parameters import dtype_of, shapes

_SEQUENCE = 1
"""Dim of the sequence in tokens, hidden states and logits."""
_TABLES = ("embedding.tokens", "head")
"""Modules whose weights have a row for every token of the padded vocabulary."""


def placements(case: Case) -> dict[str, Placement]:
    """How every parameter lies on the axis wp: linears by plain rows, since no rank ever uses a part of one."""
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
    """How a module's output [rows of a data rank, seq, width] lies on the mesh; None for a module unknown here.

    Everything is split along the sequence over tp, but the logits that were exchanged or gathered.
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
    """Features of an output, all heads together."""
    leaf = module.rpartition(".")[2]
    if is_column(module) or is_row(module):
        return shapes(case)[f"{module}.weight"][0]
    if leaf in ("q_norm", "k_norm"):
        return (case.heads if leaf == "q_norm" else case.kv_heads) * case.head_dim
    block = module.startswith("layers.") and (leaf.isdigit() or leaf in ("attention", "mlp"))
    if block or leaf in ("embedding", "attention_norm", "mlp_norm", "final_norm"):
        return case.hidden
    return None


def partial(case: Case, name: str) -> bool:
    """Every rank sees tokens of its own, so the gradient of whatever is whole is a partial sum everywhere."""
    return not _is_split(name.rpartition(".")[0])


def parts(case: Case, mesh: Mesh, device: torch.device) -> Parts:
    """The strategy of a case on one rank."""
    sequence, weights = mesh.axis("tp"), mesh.axis("wp")
    places, dtype = placements(case), dtype_of(case)
    plan = PrefetchPlan(ahead=case.overlap, fused=case.fuse_weights, again=computed_again(case))
    own_stages = held_at(case, mesh.coordinates)
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
        loss=partial_of(_loss, case, sequence, mesh.rank),
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
