"""Bugs of the forward and the backward pass: data, layers, attention, loss, metric, dropout, recomputation."""

from __future__ import annotations

from suites.mutants.mutant import TENSOR
from suites.mutants.unseen.bug import bug

__all__ = ["PASSES"]

_INTERNEVO = ("mtp", "msp", "fsp", "isp")
_STAGED = (*TENSOR, "isp")
_ATTENTION = "layers.0.attention|layers.0.attention.wo"
_ENTERS_CORE = "layers.1.attention|layers.1.attention.wqkv"

PASSES = (
    bug(
        "scale-by-heads",
        "parallel.layers.attention",
        ("is_causal=visible is None)", "is_causal=visible is None, scale=q.shape[1] ** -0.5)"),
        stands_for="a scale taken from the wrong dim after heads and sequence were exchanged",
        case="mode=tp tp=2",
        cause="scores of attention are scaled by the number of this rank's heads in place of the width of one head",
        at=("forward", _ATTENTION),
    ),
    bug(
        "tokens-by-mask",
        "parallel.training.step",
        ("tokens += weights.sum()", "tokens += batch.loss_mask.sum()"),
        stands_for="a denominator of the loss that counts other tokens than its numerator",
        case="mode=tp tp=2",
        cause="tokens whose label is ignored count in the denominator of the mean loss",
        at=("loss|grad_sync", "*"),
    ),
    bug(
        "data-rank-by-modulo",
        "parallel.communication.batch",
        ('micro_batch(case, step, micro, mesh.axis("dp").rank)', "micro_batch(case, step, micro, mesh.rank % case.dp)"),
        stands_for="a sampler sharded by the global rank under tensor parallelism",
        case="mode=tp tp=2 dp=2",
        cause="a rank reads the data of the data rank that its global rank modulo dp names",
        at=("data|forward", "*"),
        needed="dp=2",
    ),
    bug(
        "first-positions-for-all",
        "parallel.schemes.weight_parallel",
        (
            "tokens, positions = (own_slice(x, sequence, dim=_SEQUENCE) for x in (batch.tokens, batch.positions))\n",
            "tokens = own_slice(batch.tokens, sequence, dim=_SEQUENCE)\n"
            "        positions = batch.positions[:, : tokens.shape[1]]\n",
        ),
        stands_for="sequence parallelism by all-to-all: positions that begin at 0 on every rank",
        case="mode=isp tp=2",
        cause="every rank of the sequence takes the positions of the first one",
        at=("forward", "embedding"),
        needed="mode=isp",
        modes=("isp",),
    ),
    bug(
        "parallel-residual",
        "parallel.model.transformer",
        ('x = x + self._dropped("attention",', 'attended = x + self._dropped("attention",'),
        ('y: Tensor = x + self._dropped("mlp",', 'y: Tensor = attended + self._dropped("mlp",'),
        stands_for="a block refactored as in GPT-J, whose attention and MLP are parallel",
        case="mode=tp-sp tp=2",
        cause="the MLP reads what entered the block and not what attention left",
        at=("forward", "layers.0.mlp_norm"),
    ),
    bug(
        "exchanged-gradients-swapped",
        "parallel.layers.ulysses",
        ("k_all, v_all = copies", "v_all, k_all = copies"),
        stands_for="ML#1465's kind: gradients of keys and values of an exchange mixed up",
        case="mode=isp tp=2",
        cause="behind the all-to-all of backward the gradients of keys and of values are taken for each other",
        at=("backward", _ENTERS_CORE),
        needed="mode=isp",
        modes=("isp",),
    ),
    bug(
        "no-column-of-its-own",
        "parallel.layers.loss",
        ("real = max(0, min(columns, vocab - first))", "real = min(columns, vocab - first)"),
        stands_for="ML#1754's kind: a rank whose part of the vocabulary is padding alone",
        case="mode=tp tp=2 vocab=100",
        cause="on a rank without a real column a negative count leaves padded columns in the softmax",
        at=("loss", ""),
        needed="vocab=100",
        modes=_STAGED,
    ),
    bug(
        "layers-behind-units",
        "parallel.model.transformer",
        ("rest = held[sum(map(len, self.units)) :] if", "rest = held[len(self.units) :] if"),
        stands_for="recomputation by units: layers counted where units were meant",
        case="mode=tp tp=2 recompute=full recompute_layers=2",
        cause="layers are run a second time behind the recomputed units when a unit has several",
        at=("forward", "layers.1*|final_norm"),
        needed="recompute_layers=2",
        modes=(*TENSOR, "autotp"),
    ),
    bug(
        "right-summed-twice",
        "parallel.layers.metric",
        (
            "right_of = all_reduce(right.expand(DATASETS), self.counts)\n"
            "        right = all_reduce(right, self.counts)\n",
            "right = all_reduce(right, self.counts)\n"
            "        right_of = all_reduce(right.expand(DATASETS), self.counts)\n",
        ),
        stands_for="SkyRL#1420: a metric that is summed over ranks twice",
        case="mode=mtp tp=2 metric=true",
        cause="the right answers of a dataset are summed over the ranks after they were summed already",
        at=("metric", ""),
        needed="metric=true",
        modes=_INTERNEVO,
    ),
    bug(
        "mask-in-row-order",
        "parallel.context.gathered",
        ("held[axis.rank], slices.whole)", "held[axis.rank], slices.whole.sort()[0])"),
        stands_for="context parallelism by all-gather: keys that lie in the order of the ranks under a mask of the row",
        case="mode=tp tp=1 cp=2 cp_comm=gather",
        cause="gathered keys lie in the order of the ranks, and the mask takes them for the order of the row",
        at=("forward", _ATTENTION),
        needed="cp_comm=gather",
        modes=_STAGED,
    ),
    bug(
        "samples-by-rank-first",
        "parallel.randomness.dropout",
        ('(micro * self.case.dp + self.at["dp"][0]) * count', '(self.at["dp"][0] * self.case.micro + micro) * count'),
        stands_for="samples of a step numbered in the order of ranks where the data are in that of micro-batches",
        case="mode=tp tp=1 dp=2 dropout=0.1",
        cause="dropout numbers the samples by data rank first and then by micro-batch",
        at=("forward", "embedding"),
        needed="dropout=0.1 dp=2",
    ),
    bug(
        "positions-of-later-stages",
        "parallel.context.scheme",
        ("tokens, labels, loss_mask, positions = (", "tokens, labels, loss_mask = ("),
        (
            "batch.loss_mask, batch.positions)\n        )\n",
            "batch.loss_mask)\n        )\n"
            "        positions = sliced(batch.positions, own) if tokens.numel() else batch.positions[:, : len(own)]\n",
        ),
        stands_for="rotary positions under pipeline and context parallelism: a stage without tokens counts from 0",
        case="mode=tp tp=1 pp=2 cp=2 positions=rope",
        cause="pipeline stages that are sent no tokens take the first positions of the row for those of their slice",
        at=("forward", "layers.1.attention|layers.1.attention.wo"),
        needed="positions=rope pp=2 cp=2",
        modes=("tp", "tp-sp"),
    ),
    bug(
        "packed-slices-see-all",
        "parallel.context.scheme",
        ("slices=Slices(held=held, hidden=hidden)", "slices=Slices(held=held)"),
        stands_for="context parallelism whose kernel is called as causal, without the borders of packed sequences",
        case="mode=tp tp=1 cp=2 packed=true positions=rope",
        cause="context ranks forget the borders of packed sentences",
        at=("forward", _ATTENTION),
        needed="cp=2 packed=true",
        modes=_STAGED,
    ),
    bug(
        "values-without-dropout",
        "parallel.context.blocks",
        ('"bqkgs,bqkgd->bskd", _dropped(weight, keep_BNqs), grad', '"bqkgs,bqkgd->bskd", weight, grad'),
        stands_for="ML#1465's kind: ring attention, gradient of the values",
        case="mode=tp tp=1 cp=2 attention_dropout=0.1",
        cause="the gradient of values is computed from shares of attention that dropout has not touched",
        at=("backward", _ENTERS_CORE),
        needed="cp=2 attention_dropout=0.1",
        modes=_STAGED,
    ),
    bug(
        "ring-not-awaited",
        "parallel.context.ring",
        ("    if not overlap:\n        arrived()\n        works = []\n", "    if not overlap:\n        works = []\n"),
        stands_for="a receive buffer that is read before its receive was waited for",
        case="mode=tp tp=1 cp=2 overlap=false",
        cause="without overlap the hops of a ring are never waited for",
        at=("forward", _ATTENTION),
        needed="cp=2 overlap=false",
        modes=_STAGED,
    ),
)
