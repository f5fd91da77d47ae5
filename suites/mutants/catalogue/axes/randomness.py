"""Streams, fields, dropout: masks that differ where they must agree, or agree where they must differ (bugs.md 6i)."""

from __future__ import annotations

from suites.mutants.mutant import SPLIT, TENSOR, WHOLE, Change, Mutant, Words, everywhere

__all__ = ["RANDOMNESS"]

_RATES: Words = {"dropout": 0.2, "attention_dropout": 0.3}
_STATEFUL: Words = {**_RATES, "random": "stateful"}
_AGAIN: Words = {**_STATEFUL, "recompute": "full"}
_CONTEXT: Words = {"cp": 2, "seq": 48, "metric": False}
_EVENLY = {**everywhere("tp>1", TENSOR), "isp": "tp>1", "autotp": "tp>1 kv_heads_rest=0"}
_MODES = (*TENSOR, "isp")
_STREAM = 'self.streams.fork(MODEL_PARALLEL if split or "tp" in place.axes else DEFAULT)'
_SHARES = "layers.0.attention"


def _change(module: str, old: str, new: str) -> tuple[Change, ...]:
    return (Change(module=f"parallel.randomness.{module}", old=old, new=new),)


RANDOMNESS = (
    Mutant(
        name="split-hidden-states-from-the-default-stream",
        stands_for="B-100: Megatron #1256, dropout under sequence parallelism from the wrong stream for 16 months",
        modes=everywhere("tp>1", (*SPLIT, "isp")),
        suite=_STATEFUL,
        changes=_change("dropout", _STREAM, "self.streams.fork(MODEL_PARALLEL if split else DEFAULT)"),
        kills="masks",
        alone=True,
        phase="forward",
        region="embedding",
    ),
    Mutant(
        name="whole-hidden-states-from-the-model-parallel-stream",
        stands_for="B-104: seeds that differ where they must be equal, TP replicas",
        modes=everywhere("tp>1", (*WHOLE, "autotp")),
        suite=_STATEFUL,
        changes=_change("dropout", _STREAM, "self.streams.fork(MODEL_PARALLEL)"),
        kills="replicas",
        phase="forward",
        region="embedding",
    ),
    Mutant(
        name="shares-of-attention-from-the-default-stream",
        stands_for="B-104: equal masks on all heads; DeepSpeed and PaddleFleetX #1005",
        modes=everywhere("tp>1", WHOLE) | {"autotp": "tp>1 kv_heads_rest=0"},
        suite=_STATEFUL,
        changes=_change("dropout", _STREAM, 'self.streams.fork(MODEL_PARALLEL if "tp" in place.axes[1:] else DEFAULT)'),
        kills="masks",
        phase="forward",
        region=_SHARES,
    ),
    Mutant(
        name="model-parallel-seed-of-all-ranks",
        stands_for="B-104: the model-parallel seed is not offset by the rank (InternLM #405)",
        modes=_EVENLY,
        suite=_STATEFUL,
        changes=_change("streams", "own + 2718 + tp_rank", "own + 2718"),
        kills="masks",
        phase="forward",
        region=f"embedding|{_SHARES}",
    ),
    Mutant(
        name="default-seed-of-every-rank",
        stands_for="B-101, B-104: the default stream is offset by the rank, and replicas drop other elements",
        modes=everywhere("tp>1", (*WHOLE, "autotp")),
        suite=_STATEFUL,
        changes=_change("streams", "DEFAULT: own,", "DEFAULT: own + tp_rank,"),
        kills="replicas",
        phase="forward",
        region="embedding",
    ),
    Mutant(
        name="context-ranks-share-streams",
        stands_for="X13: Megatron-LM #4828, masks repeat along the sequence",
        modes=everywhere("", _MODES),
        suite={**_STATEFUL, **_CONTEXT},
        changes=_change("streams", "100 * pp_rank + CONTEXT_STRIDE * cp_rank", "100 * pp_rank"),
        kills="masks",
        phase="forward",
        region="embedding",
    ),
    Mutant(
        name="recompute-without-restored-streams",
        stands_for="checkpoint(preserve_rng_state=False) over dropout: backward drops other elements than forward",
        modes=everywhere(),
        suite=_AGAIN,
        changes=_change("dropout", "self.streams.rewound(self.streams.state_dict())", "nullcontext()"),
        kills="activation_gradients",
        phase="backward|recompute",
        region="layers.*",
    ),
    Mutant(
        name="recompute-restores-the-default-stream-alone",
        stands_for="around.md 16: states restored before the rerun, but not the tracker's",
        modes=everywhere(),
        suite=_AGAIN,
        changes=_change(
            "streams",
            "self.load_state_dict(states)\n        try",
            "self.load_state_dict({**now, DEFAULT: states[DEFAULT]})\n        try",
        ),
        kills="activation_gradients",
        phase="backward|recompute",
        region="layers.*",
    ),
    Mutant(
        name="recompute-moves-the-streams-back",
        stands_for="Megatron-LM checkpoints before the states of now were put back: numbers are drawn twice",
        modes=everywhere(),
        condition="layers>1",
        suite=_AGAIN,
        changes=_change("streams", "self.load_state_dict(now)", "pass"),
        kills="masks",
        phase="forward",
        region="embedding|layers.*",
    ),
    Mutant(
        name="fork-that-does-not-return",
        stands_for="B-102: a foreign stream stays in force, and whole hidden states are dropped by it",
        modes=everywhere("tp>1", (*WHOLE, "autotp")),
        suite=_STATEFUL,
        changes=_change("streams", "self._switch(outer)", "self._current = outer"),
        kills="replicas",
        phase="forward",
        region="layers.0.attention|embedding",
    ),
    Mutant(
        name="twice-the-rate",
        stands_for="keep and drop probability confused in part: a rate that is not the one of the divisor",
        modes=everywhere(),
        suite=_STATEFUL,
        changes=_change("dropout", "dtype=torch.float32) >= rate", "dtype=torch.float32) >= 2 * rate"),
        kills="masks",
        phase="forward",
        region="embedding",
    ),
    Mutant(
        name="drops-what-it-should-keep",
        stands_for="PyTorch's p drops and older frameworks' p keeps",
        modes=everywhere(),
        suite=_RATES,
        changes=_change("field", "return first >= math.ceil", "return first < math.ceil"),
        kills="masks",
        phase="forward",
        region="embedding",
    ),
    Mutant(
        name="hidden-states-not-divided-by-what-is-kept",
        stands_for="a fused dropout-add that applies a mask and not its scale",
        modes=everywhere(),
        suite=_RATES,
        changes=_change("dropout", "return x * keep / (1 - self.case.dropout)", "return x * keep"),
        kills="activations",
        phase="forward",
        region="embedding|layers.0|layers.0.attention_norm|layers.0.attention*",
    ),
    Mutant(
        name="shares-divided-by-the-rate-of-hidden-states",
        stands_for="one rate for two: attention_dropout taken from hidden_dropout",
        modes=everywhere(),
        suite=_RATES,
        changes=_change("dropout", ".to(dtype) / (1 - rate)", ".to(dtype) / (1 - self.case.dropout)"),
        kills="activations",
        phase="forward",
        region="layers.0.attention*",
    ),
    Mutant(
        name="field-at-local-samples",
        stands_for="the same masks for every micro-batch and data rank",
        modes=everywhere(),
        suite=_RATES,
        changes=_change("dropout", "samples=first + held[0]", "samples=held[0]"),
        kills="masks",
        phase="forward",
        region="embedding",
    ),
    Mutant(
        name="field-at-local-places",
        stands_for="coordinates of a shard in place of those of the full tensor: shards repeat each other",
        modes=everywhere("tp>1"),
        suite=_RATES,
        changes=_change("field", "return found", "return [torch.arange(len(index)) for index in found]"),
        kills="masks",
        phase="forward",
        region=f"embedding|{_SHARES}",
    ),
    Mutant(
        name="field-that-knows-no-step",
        stands_for="RNG reset by a later manual_seed (ms-swift #9935): every step drops the same",
        modes=everywhere(),
        suite=_RATES,
        changes=_change("dropout", "                step=step,", "                step=0,"),
        kills="masks",
        phase="forward",
        region="embedding",
    ),
    Mutant(
        name="context-gradient-of-shares-without-their-mask",
        stands_for="dropout of a ring's forward is forgotten in its backward",
        modes=everywhere("", _MODES),
        suite={**_RATES, **_CONTEXT},
        changes=(
            Change(
                module="parallel.context.blocks",
                old='_dropped(torch.einsum("bqkgd,bskd->bqkgs", grad, v), keep_BNqs)',
                new='torch.einsum("bqkgd,bskd->bqkgs", grad, v)',
            ),
        ),
        kills="activation_gradients",
        phase="backward",
        region="layers.?.attention*",
    ),
)
