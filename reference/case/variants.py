"""Known deviations of real systems from the right mathematics, as data: which cases can show each, and its source.

A variant is a word of the case (`variant=NAME`). The dense model ignores it: the truth stays the truth, so that a
subject that offers a variant must fail. What each replaces in our implementation is `parallel.variants`.
Sources are rows of modes.md, section 10.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["VARIANTS", "Variant", "lack", "words"]

Word = int | float | bool | str


def _nothing(_values: Mapping[str, Any]) -> str:
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One deviation.

    modes   the modes whose real system shows it
    needs   words that a case must have to show it
    above   words whose number must be larger than this
    rest    what else a case lacks to show it, from its values; "" when nothing
    words   words that turn a case of one of these modes into one that shows it
    """

    deviation: str
    source: str
    modes: tuple[str, ...]
    needs: Mapping[str, Word]
    above: Mapping[str, float]
    words: Mapping[str, Word]
    rest: Callable[[Mapping[str, Any]], str] = _nothing


_ON_TP = {"tp": 1}
_HIDDEN: dict[str, Word] = {"embedding": "hidden", "tied": False}
_STAGES: dict[str, Word] = {"pp": 2, "layers": 3, "first_layers": 2, "metric": False}
_CONTEXT: dict[str, Word] = {"cp": 2, "seq": 48, "metric": False}


def _grouped(v: Mapping[str, Any]) -> str:
    return "" if v["kv_heads"] < v["heads"] else "shows with fewer kv_heads than heads only"


def _no_whole_thirds(v: Mapping[str, Any]) -> str:
    group = (v["heads"] // v["kv_heads"] + 2) * (v["hidden"] // v["heads"])
    return "" if group % 3 == 0 else f"shows where 3 divides the {group} rows of a kv group only"


def _evenly(v: Mapping[str, Any]) -> str:
    return "" if v["kv_heads"] % v["tp"] else "shows where tp does not divide kv_heads only"


def _one_way_at_a_time(v: Mapping[str, Any]) -> str:
    return "" if v["micro"] > 2 else "shows with micro above pp=2 only, else no batch goes both ways"


def _several_buckets(v: Mapping[str, Any]) -> str:
    table = v["vocab"] // v["tp"] * v["hidden"]
    return "" if v["bucket"] < table else f"shows with bucket below the {table} elements of a rank's token table only"


VARIANTS: dict[str, Variant] = {
    "norm-average": Variant(
        deviation="gradients of norms (and of row biases) are averaged over tp where they must be summed: 1/tp of them",
        source="G1: InternEvo msp and fsp, all-reduce AVG of norm gradients",
        modes=("msp", "fsp"),
        needs={},
        above=_ON_TP,
        words={},
    ),
    "isp-average": Variant(
        deviation="every gradient is divided by the ranks that share a sequence: 1/tp of it",
        source="G2: InternEvo isp, averages over weight and weight-data groups of a loss that tp ranks share",
        modes=("isp",),
        needs={},
        above=_ON_TP,
        words={},
    ),
    "scrambled-embedding": Variant(
        deviation="the gradient of an embedding split along hidden is reduce-scattered along rows of flat memory",
        source="E1: InternEvo isp, reduce_scatter_tensor of a [V, h] gradient for shards [V, h/w]",
        modes=("isp",),
        needs={"embedding": "hidden"},
        above={"wp": 1},
        words=_HIDDEN,
    ),
    "gathered-logits-loss": Variant(
        deviation="logits that are gathered already are fed to the vocabulary-parallel loss: true + ln(tp)",
        source="H1: InternEvo with parallel_output=False and its default loss; Megatron issue 7452",
        modes=("tp", "tp-sp", "mtp", "msp", "fsp", "isp"),
        needs={"head": "gather"},
        above=_ON_TP,
        words={"head": "gather"},
    ),
    "flat-dim1": Variant(
        deviation="collectives along dim 1 work on flat memory: tokens of several rows get into each other's places",
        source="B1: InternEvo msp and fsp, unpacked data of several rows",
        modes=("msp", "fsp"),
        needs={"embedding": "hidden", "packed": False},
        above={**_ON_TP, "batch": 1},
        words={**_HIDDEN, "packed": False, "batch": 2},
    ),
    "label-smoothing-local": Variant(
        deviation="label smoothing takes the number of classes and the mean of one rank's part of the vocabulary",
        source="S1: Megatron vocab_parallel_cross_entropy (issues 737, 7464) and InternEvo's copy of it",
        modes=("tp", "tp-sp", "mtp", "msp", "fsp"),
        needs={"head": "parallel"},
        above={**_ON_TP, "label_smoothing": 0},
        words={"head": "parallel", "label_smoothing": 0.1},
    ),
    "decoder-layer-thirds": Variant(
        deviation="a fused weight whose rows lie kv group by kv group is cut as q, k and v one behind the other",
        source="X16: DeepSpeed 0.19.8 AutoTP, glmtype for every *DecoderLayer (Persimmon, InternLM2)",
        modes=("autotp",),
        needs={"fuse_qkv": True},
        above=_ON_TP,
        words={"fuse_qkv": True, "heads": 12, "kv_heads": 12, "hidden": 72},
        rest=_no_whole_thirds,
    ),
    "context-heads-repeated": Variant(
        deviation="every kv head goes round the context ranks once a query head of its group: n/kv times the bytes",
        source="around.md 14.1, 19: picotron repeats kv heads before its ring",
        modes=("tp", "tp-sp", "mtp", "msp", "fsp"),
        needs={"cp_comm": "ring"},
        above={"cp": 1},
        words={**_CONTEXT, "heads": 24, "kv_heads": 12, "hidden": 96},
        rest=_grouped,
    ),
    "dropped-heads": Variant(
        deviation="every rank takes kv_heads // tp kv heads, and what is left over is on no rank",
        source="X16: DeepSpeed 0.19.8 qkv_size_per_partition, num_kv // mp_size",
        modes=("autotp",),
        needs={},
        above=_ON_TP,
        words={"heads": 14, "kv_heads": 7, "hidden": 84},
        rest=_evenly,
    ),
    "two-stage-swap": Variant(
        deviation="activations and gradients of two interleaved stages are one batch in one group, and are swapped",
        source="PP1: Megatron-Core 0.16.1, interleaved with pp=2 and batch_p2p_comm, refused by its arguments only",
        modes=("tp", "tp-sp"),
        needs={"pp": 2, "schedule": "interleaved"},
        above={},
        words={"pp": 2, "schedule": "interleaved", "chunks": 2, "layers": 4, "micro": 4},
        rest=_one_way_at_a_time,
    ),
    "ckpt-early-stop": Variant(
        deviation="backward computes a unit of layers again only up to what it needs, so its last sum is not repeated",
        source="around.md 16, 19: torch 2.13 checkpoint without reentrance, early_stop=True by default",
        modes=("tp", "tp-sp", "mtp", "msp", "fsp"),
        needs={"recompute": "full", "early_stop": False, "dropout": 0.0},
        above=_ON_TP,
        words={"recompute": "full", "early_stop": False},
    ),
    "ddp-rebuild": Variant(
        deviation="the gradients of the first step are one bucket, those of later steps buckets of the size asked for",
        source="around.md 15.3, 19: torch 2.13 DistributedDataParallel, which rebuilds its buckets after step 1",
        modes=("tp", "tp-sp"),
        needs={"zero": 0, "pp": 1},
        above={"dp": 1, "bucket": 0},
        words={"dp": 3, "bucket": 700},
        rest=_several_buckets,
    ),
    "pp-scale-missing": Variant(
        deviation="gradients of a pipeline are not divided by its micro-batches: micro times too large",
        source="around.md 13.5, 19: picotron train_step_pipeline_1f1b and train_step_pipeline_afab",
        modes=("tp", "tp-sp"),
        needs={},
        above={"pp": 1, "micro": 1},
        words={**_STAGES, "micro": 3},
    ),
    "tied-no-sync": Variant(
        deviation="first and last stage each have a copy of the tied token table, whose gradients nobody sums",
        source="around.md 13.5, 19: torch 2.13 pipelining.Pipe copies replicated_params; Megatron issue 656",
        modes=("tp", "tp-sp"),
        needs={"tied": True},
        above={"pp": 1},
        words={**_STAGES, "tied": True, "embedding": "vocab"},
    ),
    "tied-bucket-misaligned": Variant(
        deviation="the tied token table shares a bucket with others, so data ranks own other parts of it on each stage",
        source="around.md 13.5, 19: Megatron-Core before ba8f2defc5, issue 844",
        modes=("tp", "tp-sp"),
        needs={"tied": True, "zero": 1},
        above={"pp": 1, "dp": 1},
        words={**_STAGES, "tied": True, "embedding": "vocab", "zero": 1, "dp": 2},
    ),
}


def lack(values: Mapping[str, Any]) -> str:
    """What a case of these values lacks to show its variant, "" when nothing."""
    variant = VARIANTS[values["variant"]]
    if values["mode"] not in variant.modes:
        return f"is a deviation of mode={'|'.join(variant.modes)}, not of mode={values['mode']}"
    for key, value in variant.needs.items():
        if values[key] != value:
            return f"shows with {key}={str(value).lower() if isinstance(value, bool) else value} only"
    for key, bound in variant.above.items():
        if not values[key] > bound:
            return f"shows with {key} above {bound:g} only"
    return variant.rest(values)


def words(name: str) -> dict[str, Word]:
    """The words that make a case of a mode that has this variant show it. Raises ValueError for an unknown name."""
    if name not in VARIANTS:
        raise ValueError(f"variant={name}: is not a known variant; legal: {' '.join(VARIANTS)}")
    return {**VARIANTS[name].words, "variant": name}
