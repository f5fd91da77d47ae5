"""What makes the words of data parallelism legal together: `zero bucket shard no_sync prefetch wgrad grad_dtype
master scaler`.

Buckets, ZeRO-1, float32 gradients and masters, and loss scaling are Megatron-Core's, ZeRO-2 and ZeRO-3 are torch's
`fully_shard` (around.md 15), over tensor parallelism as both of them know it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from reference.case.modes import mode_of, whose

__all__ = ["WORDS", "parity_problems", "problems"]

WORDS: Mapping[str, Any] = {
    "zero": 0,
    "bucket": 0,
    "shard": 0,
    "no_sync": False,
    "prefetch": False,
    "wgrad": "plain",
    "grad_dtype": "model",
    "master": "none",
    "scaler": "none",
}
"""Each word with the value that leaves one flat sum of all gradients."""
_NARROW = ("bfloat16", "float16")


def problems(v: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Key, the rule that it breaks and a legal value, of every broken rule."""
    zero, dp, shard = v["zero"], v["dp"], v["shard"]
    for key, plain in WORDS.items():
        if not mode_of(v).data_parallel and v[key] != plain:
            owners = whose(lambda mode: mode.data_parallel)
            legal = str(plain).lower() if isinstance(plain, bool) else plain
            yield key, f"is implemented for mode={owners}, not for mode={v['mode']}", f"{key}={legal}"
    if mode_of(v).gathers_weights:
        yield from _beside_gathered_weights(v)
    if zero not in (0, 1, 2, 3):
        yield "zero", "is not a stage of ZeRO", "zero=1"
    for key in ("bucket", "shard"):
        if v[key] < 0:
            yield key, "must not be negative", f"{key}=0"
    if v["bucket"] and zero >= 2:
        yield "bucket", f"zero={zero} reduces layer by layer and fills no buckets", "bucket=0"
    if shard and zero < 2:
        yield "shard", f"shares parameters among some data ranks, and zero={zero} shares none", "shard=0"
    if shard and dp % shard:
        yield "shard", f"must divide dp={dp}", f"shard={math.gcd(dp, shard)}"
    for key in ("grad_dtype", "master"):
        if v[key] == "float32" and v["dtype"] not in _NARROW:
            yield key, f"is wider than the parameters, and dtype={v['dtype']} is not narrower", f"{key}={WORDS[key]}"
    if v["grad_dtype"] == "float32" and v["master"] == "none":
        yield "grad_dtype", "master=none steps parameters by gradients of their own dtype", "grad_dtype=model"
    yield from _layer_by_layer(v)
    yield from _scaling(v)


def parity_problems(v: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """The same of `parity`."""
    if v["parity"] < 0:
        yield "parity", "must not be negative", "parity=0"


def _beside_gathered_weights(v: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    mode = f"mode={v['mode']}"
    if v["zero"] >= 2:
        yield "zero", f"shares parameters among data ranks, and {mode} gathers its own over wp", "zero=1"
    if v["wgrad"] != "plain":
        rule = f"leaves a gradient to the buffer of all, and {mode} reduces it over wp in its backward"
        yield "wgrad", rule, "wgrad=plain"
    if v["bucket"] and v["fuse_weights"]:
        rule = "is filled in the order of backward, and fuse_weights=true reduces all weights of a block at once"
        yield "bucket", rule, "bucket=0"


def _layer_by_layer(v: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    zero = v["zero"]
    for key in ("no_sync", "prefetch"):
        if v[key] and zero < 2:
            rule = f"is about layers that are gathered and reduced one by one, and zero={zero} has none"
            yield key, rule, f"{key}=false"
    if zero >= 2 and v["pp"] > 1 and not v["no_sync"]:
        rule = (
            f"a stage of pp={v['pp']} keeps whole gradients of all its micro-batches, and sums them once (zero={zero})"
        )
        yield "no_sync", rule, "no_sync=true"
    if v["wgrad"] != "plain" and zero >= 2:
        yield (
            "wgrad",
            f"zero={zero} sums a layer's gradients in its backward, whole as autograd has them",
            "wgrad=plain",
        )


def _scaling(v: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    scaler, scale = v["scaler"], v["loss_scale"]
    if scaler != "none" and v["dtype"] != "float16":
        yield (
            "scaler",
            f"is for gradients of few exponents, and dtype={v['dtype']} has as many as float32",
            "dtype=float16",
        )
    if scaler != "none" and v["master"] == "none":
        yield "scaler", "unscales gradients in float32, so that what was scaled is not lost again", "master=float32"
    if not scale >= 1 or math.isinf(scale) or math.frexp(scale)[0] != 0.5:
        yield "loss_scale", "must be a power of two, so that scaling rounds nothing", "loss_scale=65536.0"
    if scaler == "none" and scale != 1:
        yield "loss_scale", "scales with a scaler only, and scaler=none", "loss_scale=1.0"
