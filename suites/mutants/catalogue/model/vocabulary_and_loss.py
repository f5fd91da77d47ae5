"""The split vocabulary, the loss over it, which tokens count, and tied tables (bugs.md 6f and 6g)."""

from __future__ import annotations

from suites.mutants.mutant import TENSOR, Change, Mutant, everywhere

__all__ = ["PARALLEL", "VOCABULARY_AND_LOSS"]

PARALLEL = everywhere("head=parallel", TENSOR) | {"isp": "head=exchange"}
"""Modes -> words with which the loss runs over a split vocabulary."""
_TABLES = everywhere("", ("tp", "tp-sp")) | everywhere("embedding=vocab", ("mtp", "msp", "fsp"))
_COUNTED = "return loss_mask * (labels != IGNORED)"
_LOOKUP = "functional.embedding(local.masked_fill(outside, 0), weight)"
_RANGE = "outside = (local < 0) | (local >= weight.shape[0])"
_LABELS = "elsewhere = (place < 0) | (place >= real)"
_TIED = "tied"


def _loss(old: str, new: str) -> tuple[Change, ...]:
    return (Change(module="parallel.layers.loss", old=old, new=new),)


def _head(weight: str) -> tuple[Change, ...]:
    return (
        Change(
            module="parallel.model.transformer",
            old=f"self.head(self.final_norm(x), {_TIED})",
            new=f"self.head(self.final_norm(x), {weight})",
        ),
    )


VOCABULARY_AND_LOSS = (
    Mutant(
        name="label-smoothing-by-parts",
        stands_for="B-74: Megatron #7452-1, the mean of label smoothing is taken over one rank's part",
        modes=PARALLEL,
        condition="label_smoothing>0",
        changes=_loss("terms = _summed(terms, axis, fused)", "terms = _summed(terms[:2], axis, fused) + terms[2:]"),
        kills="replicas",
        phase="loss",
        region="",
        cause="loss_by_parts|missing_call|wrong_payload",
    ),
    Mutant(
        name="label-smoothing-counts-one-part",
        stands_for="B-74: Megatron #737, smoothing divided by the classes of one rank (decision S1)",
        modes=PARALLEL,
        condition="label_smoothing>0",
        changes=_loss("spread = smoothing / (vocab - 1)", "spread = smoothing / (columns - 1)"),
        kills="forward",
        phase="loss",
        region="",
        cause="smoothing_by_part",
    ),
    Mutant(
        name="foreign-tokens-not-masked",
        stands_for="B-76: TTrace's list, PaddleFleet #104, ids of other shards look up row 0",
        modes=_TABLES,
        changes=(
            Change(
                module="parallel.layers.embedding",
                old=f"return {_LOOKUP}.masked_fill(outside[..., None], 0)",
                new=f"return {_LOOKUP}",
            ),
        ),
        kills="activations",
        phase="forward",
        region="embedding",
        cause="foreign_rows",
    ),
    Mutant(
        name="embedding-range-off-by-one",
        stands_for="B-76: the range of a shard begins one row late",
        modes=_TABLES,
        changes=(
            Change(
                module="parallel.layers.embedding", old="local = ids - first", new="local = ids - first + (first > 0)"
            ),
        ),
        kills="activations",
        phase="forward",
        region="embedding",
        cause="rows_late",
    ),
    *(
        Mutant(
            name=f"table-range-{name}",
            stands_for="B-76: the range of rows of a shard is one row off",
            modes=_TABLES,
            changes=(Change(module="parallel.layers.embedding", old=_RANGE, new=new),),
            kills="activations",
            phase="forward",
            region="embedding",
            cause="edge_off",
        )
        for name, new in {
            "without-its-last-row": _RANGE.replace("shape[0])", "shape[0] - 1)"),
            "without-its-first-row": _RANGE.replace("local < 0", "local < 1"),
            "and-the-row-after": f"{_RANGE.replace('>=', '>')}\n    local = local.clamp(max=weight.shape[0] - 1)",
            "and-the-row-before": f"{_RANGE.replace('local < 0', 'local < -1')}\n    local = local.clamp(min=0)",
        }.items()
    ),
    *(
        Mutant(
            name=f"label-range-{name}",
            stands_for="B-76: the range of columns that a rank looks for labels in is one column off",
            modes=PARALLEL,
            changes=_loss(_LABELS, new),
            kills="forward",
            phase="loss",
            region="",
            cause="edge_off",
        )
        for name, new in {
            "without-its-last-column": _LABELS.replace("real)", "real - 1)"),
            "without-its-first-column": _LABELS.replace("place < 0", "place < 1"),
            "and-the-column-after": f"{_LABELS.replace('>=', '>')}\n        place = place.clamp(max=max(real - 1, 0))",
            "and-the-column-before": f"{_LABELS.replace('< 0', '< -1')}\n        place = place.clamp(min=0)",
        }.items()
    ),
    Mutant(
        name="last-token-out-of-the-softmax",
        stands_for="B-80: the last real column of the vocabulary is taken for padding",
        modes=PARALLEL,
        changes=_loss("real = max(0, min(columns, vocab - first))", "real = max(0, min(columns, vocab - 1 - first))"),
        kills="forward",
        phase="loss",
        region="",
        cause="edge_off",
    ),
    Mutant(
        name="tokens-counted-in-bfloat16",
        stands_for="a count of tokens in the run dtype: bfloat16 holds whole numbers up to 256 only",
        modes=everywhere(),
        suite={"dtype": "bfloat16", "seq": 96, "batch": 3},
        changes=(
            Change(
                module="parallel.training.step",
                old="tokens += weights.sum()",
                new="tokens = (tokens + weights.sum()).bfloat16().double()",
            ),
        ),
        kills="tokens",
        alone=True,
        phase="grad_sync",
        region="",
        cause="",
    ),
    Mutant(
        name="tokens-of-a-data-rank-left-out",
        stands_for="torchtitan #2206 and its kin: the count that the mean divides by misses a data rank",
        modes=everywhere(),
        condition="dp>1",
        changes=(
            Change(
                module="parallel.training.loop",
                old="    loss, tokens = sync.sum_scalars(",
                new='    tokens = tokens * (mesh.axis("dp").rank > 0)\n    loss, tokens = sync.sum_scalars(',
            ),
        ),
        kills="tokens",
        phase="loss",
        region="",
        cause="micro_missing",
    ),
    Mutant(
        name="padded-columns-count",
        stands_for="B-80: Megatron #1754, #445, padded rows of the vocabulary take part in the softmax",
        modes=PARALLEL,
        condition="padding>0",
        changes=_loss("x[..., real:] = -torch.inf", "pass"),
        kills="forward",
        phase="loss",
        region="",
        cause="padding_counted",
    ),
    Mutant(
        name="sentinel-meets-padding",
        stands_for="B-77: apple CCE #59, the sign for a target elsewhere matches a padded column",
        modes=PARALLEL,
        changes=_loss("(place >= real)", "(place >= columns)"),
        equivalent="A label is IGNORED, which is negative, or an id below the true vocabulary. On a rank `real` is how "
        "many of its columns lie below the true vocabulary, so no label less `first` falls in [real, columns): the two "
        "conditions agree on every label. tests/parallel/layers/test_parallel_loss.py covers labels of other values.",
    ),
    Mutant(
        name="sequence-group-in-the-vocabulary-loss",
        stands_for="B-79: InternEvo PR #316, one loss mixes a split vocabulary and a split sequence",
        modes={"isp": "head=local"},
        changes=(
            Change(
                module="parallel.schemes.weight_parallel",
                old='sequence if case.head == "exchange" else alone',
                new='sequence if case.head != "gather" else alone',
            ),
        ),
        kills="forward",
        phase="loss",
        region="",
        cause="extra_call|more_classes",
    ),
    Mutant(
        name="ignored-labels-learned",
        stands_for="B-110: InternEvo 20a2832, tokens whose label says not to learn are learned",
        modes=everywhere(),
        changes=_loss(_COUNTED, "return loss_mask"),
        kills="forward",
        phase="loss",
        region="",
        cause="ignored_learned",
    ),
    Mutant(
        name="loss-mask-left-out",
        stands_for="Megatron #7452-3 and its kin: the mask of the loss is not part of the mean",
        modes=everywhere(),
        changes=_loss(_COUNTED, "return (labels != IGNORED).to(loss_mask.dtype)"),
        kills="forward",
        phase="loss",
        region="",
        cause="mask_ignored",
    ),
    Mutant(
        name="mean-over-all-tokens",
        stands_for="modes.md 3.4: InternEvo's doc-era loss divides by all tokens, ignored ones too",
        modes=everywhere(),
        changes=(
            Change(module="parallel.training.step", old="tokens += weights.sum()", new="tokens += weights.numel()"),
        ),
        kills="forward",
        phase="loss",
        region="",
        cause="constant_factor|local_count",
    ),
    Mutant(
        name="tied-gradient-counted-twice",
        stands_for="B-83: torchtitan #3174, the gradient of a tied weight is written back for each of its names",
        modes=everywhere(),
        condition="tied=true",
        changes=_head(f"2 * {_TIED} - {_TIED}.detach()"),
        kills="parameter_gradients",
        phase="backward",
        region="embedding.tokens|head",
        cause="tied_twice",
    ),
    Mutant(
        name="tied-head-without-its-gradient",
        stands_for="B-81: Megatron #656, the gradient of the tied head does not reach the embedding",
        modes=everywhere(),
        condition="tied=true",
        changes=_head(f"{_TIED}.detach()"),
        kills="parameter_gradients",
        phase="backward",
        region="embedding.tokens|head",
        cause="tied_part",
    ),
    Mutant(
        name="tied-head-keeps-an-old-copy",
        stands_for="B-81: Megatron #656, head and embedding become untied: one copy is not updated",
        modes=everywhere(),
        condition="tied=true",
        changes=_head(f"{_TIED} + (self.__dict__.setdefault('_old', {_TIED}.detach().clone()) - {_TIED}).detach()"),
        kills="forward",
        phase="forward|step",
        region="",
        cause="untied",
    ),
)
