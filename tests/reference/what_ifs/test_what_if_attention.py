"""What-ifs of exchanged heads, held against ranks that send and receive flat memory as the bug would have them do."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from reference.case import Case
from reference.data.batches import micro_batch
from reference.model import layers
from reference.model.parameters import full
from reference.training import subject as dense
from reference.what_ifs.inputs import alternatives

CPU = torch.device("cpu")
RANKS = 4
CASE = Case.parse(
    f"mode=isp tp={RANKS} layers=1 hidden=16 heads=4 kv_heads=2 ffn=12 seq=8 batch=2 micro=1 steps=1 vocab=264 "
    "positions=learned norm=layernorm bias=true fuse_qkv=false"
)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def projected(leaf: str) -> list[Tensor]:
    """Every rank's [B, s, heads, D] of this projection."""
    x = dense.true_activations(CASE, CPU)[f"act/layers.0.attention.{leaf}"]
    return list(x.unflatten(-1, (-1, CASE.head_dim)).chunk(RANKS, 1))


def exchange(xs: list[Tensor], split: int, gather: int, *, cut: bool = True, join: bool = True) -> list[Tensor]:
    """An all-to-all of equal parts of flat memory; wrong where it is not `cut` or not `join`ed along its dims."""
    sent = []
    for x in xs:
        parts = torch.cat(x.chunk(RANKS, split))
        sent.append((parts if cut else x.contiguous().reshape(parts.shape)).chunk(RANKS))
    received = [torch.cat([parts[rank] for parts in sent]) for rank in range(RANKS)]
    joined = [torch.cat(y.chunk(RANKS), gather) for y in received]
    return joined if join else [y.reshape(right.shape) for y, right in zip(received, joined, strict=True)]


def attended(*, order: str = "beside", mixed: bool = False, cut: bool = True, join: bool = True) -> Tensor:
    """The output of attention by ranks that exchange so."""
    kv = [torch.stack(pair, 2) for pair in zip(projected("wk"), projected("wv"), strict=True)]
    kv = [x.repeat_interleave(2, 3) if order == "beside" else x.repeat(1, 1, 1, 2, 1) for x in kv]
    queries = exchange(projected("wq"), 2, 1, cut=cut, join=join)
    queries = [q.transpose(0, 1).reshape(q.shape) if mixed else q for q in queries]
    visible, contexts = layers.visible(CASE.seq, None, CPU), []
    for q, both in zip(queries, exchange(kv, 3, 1, cut=cut, join=join), strict=True):
        k, v = both.unbind(2)
        contexts.append(layers.attention(q, k, v, visible).unflatten(-1, (-1, CASE.head_dim)))
    context = torch.cat(exchange(contexts, 1, 2, cut=cut, join=join), 1).flatten(2)
    weight, bias = (full(CASE, f"layers.0.attention.wo.{kind}").double() for kind in ("weight", "bias"))
    return functional.linear(context, weight, bias)


def test_exchanges_gone_wrong() -> None:
    found, wo = alternatives(CASE, CPU), "act/layers.0.attention.wo"
    close(attended(), dense.true_activations(CASE, CPU)[wo])
    close(found[f"flat_dim.joined/{wo}"], attended(join=False))
    close(found[f"flat_dim.cut/{wo}"], attended(cut=False))
    close(found[f"transposed.q/{wo}"], attended(mixed=True))
    close(found[f"kv_order/{wo}"], attended(order="one after the other"))
    assert not any(key.startswith(("transposed.", "kv_order/")) for key in alternatives(CASE.but(mode="tp", tp=2), CPU))


def test_copies_of_which_one_alone_gives_a_gradient() -> None:
    """With as many query heads as copies, the first query head of a kv head alone moves it."""
    found, truth = alternatives(CASE, CPU), dense.true_activations(CASE, CPU)
    wo, wk = "layers.0.attention.wo", "layers.0.attention.wk"
    assert torch.equal(found[f"kv_alone/act/{wo}"], truth[f"act/{wo}"])
    q, k, v = (torch.cat(projected(leaf), 1).detach() for leaf in ("wq", "wk", "wv"))
    k = k.repeat_interleave(2, 2).requires_grad_()
    context = layers.attention(q, k, v.repeat_interleave(2, 2), layers.visible(CASE.seq, None, CPU))
    slope = truth[f"act_grad/{wo}"] @ full(CASE, f"{wo}.weight").double()
    (grad,) = torch.autograd.grad(context, k, slope)
    close(found[f"kv_alone/act_grad/{wk}"], grad[:, :, ::2].flatten(2))
    close(truth[f"act_grad/{wk}"], (grad[:, :, ::2] + grad[:, :, 1::2]).flatten(2))


def test_logits_of_which_each_part_learns_its_own_labels() -> None:
    found, truth = alternatives(CASE, CPU), dense.true_activations(CASE, CPU)["act_grad/head"]
    labels, columns = micro_batch(CASE, 0, 0, 0).labels, CASE.padded_vocab // RANKS
    expected = torch.zeros_like(truth)
    for first in range(0, CASE.vocab, columns):
        mine = (labels >= first) & (labels < first + columns)
        expected[..., first : first + columns] = truth[..., first : first + columns] * mine[..., None]
    close(found[f"own_labels.{RANKS}/act_grad/head"], expected)
