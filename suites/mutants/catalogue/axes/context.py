"""Slices, rings and exchanges of context parallelism (bugs.md 6e; around.md 12, 14 and 19; field.md)."""

from __future__ import annotations

from suites.mutants.mutant import Change, Mutant, Words, everywhere

__all__ = ["CONTEXT"]

_MODES = ("tp", "tp-sp", "mtp", "msp", "fsp", "isp")
_TWO: Words = {"cp": 2, "seq": 48, "metric": False}
"""Two context ranks; a row that every drawn tp splits, zigzag or not."""
_CAUSAL: Words = {**_TWO, "packed": False, "delivery": "local"}
_HEADS: Words = {**_TWO, "heads": 48, "kv_heads": 24, "hidden": 192}
_ATTENTION = "layers.0.attention*"


def _change(module: str, old: str, new: str) -> tuple[Change, ...]:
    return (Change(module=f"parallel.context.{module}", old=old, new=new),)


CONTEXT = (
    Mutant(
        name="context-parts-added",
        stands_for="around.md 14.2: parts of attention are added without their log-sum-exp",
        modes=everywhere("", _MODES),
        suite=_TWO,
        changes=_change(
            "blocks", "return shares[0] * one[0] + shares[1] * other[0], total", "return one[0] + other[0], total"
        ),
        kills="activations",
        phase="forward",
        region=_ATTENTION,
    ),
    Mutant(
        name="context-log-sum-merged-in-float32",
        stands_for="around.md 14.2 CP2: torch's ring attention merges its parts in float32, whatever the dtype is",
        modes=everywhere("", _MODES),
        suite=_TWO,
        changes=_change(
            "blocks",
            "total = torch.logaddexp(one[1], other[1])",
            "total = torch.logaddexp(one[1].float(), other[1].float()).to(one[1].dtype)",
        ),
        kills="activations",
        phase="forward",
        region=_ATTENTION,
        cause="shorter_dtype",
    ),
    Mutant(
        name="context-no-rule-for-queries-without-keys",
        stands_for="around.md 14.2 CP1, cp-lse-nan: exp(-inf - -inf) where a block has no key that a query may see",
        modes=everywhere("", _MODES),
        suite=_TWO,
        changes=_change(
            "blocks",
            "return (score - total.masked_fill(total == -math.inf, 0.0)[..., None]).exp()",
            "return (score - total[..., None]).exp()",
        ),
        kills="activations",
        phase="forward",
        region=_ATTENTION,
        cause="nan",
    ),
    Mutant(
        name="context-backward-by-local-log-sum",
        stands_for="around.md 14.2: backward of a block with its own log-sum-exp and output; the forward is exact",
        modes=everywhere("", _MODES),
        suite=_TWO,
        changes=_change(
            "ring",
            "(whole[0], whole[1]), factors)",
            "attend(q, block[0], block[1], visible), factors)",
        ),
        kills="activation_gradients",
        phase="backward",
        region="layers.?.attention*",
    ),
    Mutant(
        name="context-mask-at-local-places",
        stands_for="TT #792, #2780: a mask or a table by the places in the slice and not in the row",
        modes=everywhere("", _MODES),
        suite=_CAUSAL,
        changes=_change(
            "slices",
            "return queries[:, None] >= keys[None, :]",
            "return torch.arange(len(queries))[:, None] >= torch.arange(len(keys))[None, :]",
        ),
        kills="activations",
        phase="forward",
        region=_ATTENTION,
        cause="slice_places",
    ),
    Mutant(
        name="context-own-block-twice",
        stands_for="ML#1465: the block of the diagonal is counted in a further step of the ring",
        modes=everywhere("", _MODES),
        suite=_TWO,
        changes=_change("ring", "return (axis.rank - step) % axis.size", "return axis.rank"),
        kills="activations",
        phase="forward",
        region=_ATTENTION,
        cause="slice_places",
    ),
    Mutant(
        name="context-gradient-one-hop-short",
        stands_for="B-25: the gradients of keys and values stay one hop before the rank that owns them",
        modes=everywhere("", _MODES),
        suite=_TWO,
        changes=_change(
            "ring",
            "home = _hop(grad_kv, axis, slices, step, overlap=ctx.overlap)",
            "short = step == axis.size - 1\n"
            "            home = Pending(None, lambda: grad_kv) if short else _hop(grad_kv, axis, slices, step, "
            "overlap=ctx.overlap)",
        ),
        kills="activation_gradients",
        phase="backward",
        region="layers.?.attention*",
        cause="missing_call",
    ),
    Mutant(
        name="context-keys-rotated-after-every-hop",
        stands_for="around.md 14.2: keys travel rotated, and a hop turns them by their positions again",
        modes=everywhere("", _MODES),
        suite={**_TWO, "positions": "rope"},
        changes=_change(
            "ring",
            "            block = block if ahead is None else ahead.wait()\n        assert whole is not None",
            "            block = block if ahead is None else ahead.wait()\n"
            "            from parallel.layers.attention import rotary_table, rotate\n"
            "            turned = rotary_table(slices.held[_owner(axis, step + 1)][None], k.shape[-1], k.dtype)\n"
            "            block = torch.stack((rotate(block[0], turned), block[1]))\n        assert whole is not None",
        ),
        kills="activations",
        phase="forward",
        region=_ATTENTION,
    ),
    Mutant(
        name="context-keys-of-the-first-step",
        stands_for="diffusers#14265: ring backward reuses the keys of its first iteration",
        modes=everywhere("", _MODES),
        suite=_TWO,
        changes=_change(
            "ring",
            "            block = block if ahead is None else ahead.wait()\n        assert home is not None",
            "            _ = block if ahead is None else ahead.wait()\n        assert home is not None",
        ),
        kills="activation_gradients",
        phase="backward",
        region="layers.?.attention*",
    ),
    Mutant(
        name="context-loss-over-data-ranks-alone",
        stands_for="B-40, verl #5983: loss and number of tokens are summed over dp, and context ranks have their own",
        modes=everywhere("", _MODES),
        suite=_TWO,
        changes=_change(
            "scheme", "loss_axes=loss_axes,\n        parts=parts", 'loss_axes=("dp",),\n        parts=parts'
        ),
        kills="replicas",
        phase="loss|grad_sync|metric",
        region="",
        cause="local_count|wrong_group|not_summed|missing_call|one_shard",
    ),
    Mutant(
        name="context-gradients-over-data-ranks-alone",
        stands_for="B-35: Megatron #906, gradients are reduced over dp where it must be dp x cp",
        modes=everywhere("", ("tp", "tp-sp", "mtp", "msp", "fsp")),
        suite=_TWO,
        changes=_change(
            "scheme",
            "data_axes=data_axes,\n        loss_axes=loss_axes,\n        parts",
            "data_axes=strategy.data_axes,\n        loss_axes=loss_axes,\n        parts",
        ),
        kills="replicas",
        phase="backward|grad_sync",
        region="*",
        cause="not_summed|wrong_group|missing_call|one_shard",
    ),
    Mutant(
        name="context-positions-of-other-slices",
        stands_for="around.md 19, cp-contiguous-rope: zigzag tokens with the positions of contiguous slices",
        modes=everywhere("", _MODES),
        suite=_TWO,
        changes=_change(
            "scheme",
            "loss_mask=loss_mask, positions=positions)",
            'loss_mask=loss_mask, positions=batch.positions.chunk(case.cp, 1)[mesh.axis("cp").rank])',
        ),
        kills="activations",
        phase="forward|data",
        region="embedding|layers.0.attention*",
        cause="slice_places",
    ),
    Mutant(
        name="context-labels-shifted-in-a-slice",
        stands_for="around.md 12.2: labels are shifted after the slice, so chunks end with another chunk's label",
        modes=everywhere("", _MODES),
        suite=_CAUSAL,
        changes=_change(
            "scheme",
            "labels=labels, loss_mask=loss_mask",
            "labels=torch.cat((tokens[:, 1:], labels[:, -1:]), 1).where(labels >= 0, labels), loss_mask=loss_mask",
        ),
        kills="forward",
        phase="data|loss|forward",
        region="*",
        cause="slice_labels",
    ),
    Mutant(
        name="context-gathered-gradients-not-summed",
        stands_for="B-12: a gather whose backward takes the own slice where other ranks' queries add to it",
        modes=everywhere("", _MODES),
        suite={**_TWO, "cp_comm": "gather"},
        changes=_change(
            "gathered",
            "gather_from_sequence(x, axis, dim=1)",
            "gather_from_sequence(x, axis, dim=1, tensor_parallel_output_grad=False)",
        ),
        kills="activation_gradients",
        phase="backward",
        region="layers.?.attention*",
        cause="missing_call|not_summed",
    ),
    Mutant(
        name="context-exchanged-in-row-order",
        stands_for="B-55: after the exchange zigzag tokens are taken for the row in order",
        modes=everywhere("", _MODES),
        suite={**_HEADS, "cp_comm": "alltoall"},
        changes=_change(
            "exchanged",
            "visible = slices.visible(slices.whole, slices.whole)",
            "visible = slices.visible(slices.whole.sort().values, slices.whole.sort().values)",
        ),
        kills="activations",
        phase="forward",
        region=_ATTENTION,
        cause="slice_places",
    ),
    Mutant(
        name="context-block-without-a-key-is-nan",
        stands_for="around.md 14.2, cp-lse-nan: the log-sum-exp of no key at all is subtracted as it is",
        modes=everywhere("", _MODES),
        suite=_TWO,
        changes=_change("blocks", "total.masked_fill(total == -math.inf, 0.0)[..., None]", "total[..., None]"),
        kills="activations",
        phase="forward",
        region=_ATTENTION,
        cause="nan",
    ),
    Mutant(
        name="context-merged-in-float32",
        stands_for="around.md 14.2, cp-f32-merge: torch's ring converts partial results to float32",
        modes=everywhere("", _MODES),
        suite=_TWO,
        changes=_change(
            "ring",
            "part = attend(q, block[0], block[1], slices.visible(own, keys), of_keys(keep, keys))",
            "part = tuple(x.float().double() for x in attend(q, block[0], block[1], slices.visible(own, keys)))",
        ),
        kills="activations",
        phase="forward",
        region=_ATTENTION,
        cause="shorter_dtype",
    ),
    Mutant(
        name="context-means-of-own-tokens",
        stands_for="around.md 14.3, cp-local-mean: a loss divided by the context rank's own count, then averaged",
        modes=everywhere("", _MODES),
        suite=_TWO,
        changes=(
            Change(
                module="parallel.training.step",
                old="summed = (losses * weights).sum()",
                new="summed = (losses * weights).sum() * weights.numel() / weights.sum().clamp(min=1)",
            ),
        ),
        kills="activation_gradients",
        phase="loss|backward",
        region="head|",
        cause="unequal_shares|local_count",
    ),
)
