"""Data parallelism: what data ranks share, and the dtype in which they send gradients. Its words and what makes them
legal.

Buckets, ZeRO-1, float32 gradients and masters, and loss scaling are Megatron-Core's. ZeRO-2 and ZeRO-3 are torch's
`fully_shard` (around.md 15), beside tensor parallelism in either system's form.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from shardproof.reference.language.core import Core, whose
from shardproof.reference.language.groups import Layout
from shardproof.reference.language.words import Problem, not_default, word

_NARROW = ("bfloat16", "float16")


def _loss_scale(v: Mapping[str, Any]) -> float:
    return {"dynamic": 2.0**32, "static": 1024.0}.get(v["scaler"], 1.0)


class DataParallel(Core):
    """A case whose data ranks share gradients, optimizer or parameters; by default one flat sum of all gradients."""

    zero: int = word(
        0,
        "what data ranks share out (ZeRO): 0 nothing, 1 the optimizer's states, 2 gradients and stored parameters too, "
        "3 parameters in use too",
        legal="0 to 3",
        domain=(0, 1, 2, 3),
        after="overlap",
        dense=0,
    )
    bucket: int = word(
        0,
        "elements that fill a bucket of gradients, which travels during backward; 0: one call after it",
        legal="0, or at least 1",
        domain=(0, 900),
        dense=0,
    )
    no_sync: bool = word(False, "gradients are summed in the last micro-batch of a step alone (zero=2|3)", dense=False)
    prefetch: bool = word(False, "a layer is gathered while the one before it computes (zero=2|3)", dense=False)
    wgrad: str = word(
        "plain",
        "gradients of weights by autograd, into the buffer, or after the last backward (zero=0|1)",
        legal=("plain", "fused", "deferred"),
        dense="plain",
    )
    shard: int = word(
        0,
        "data ranks that share one copy of the parameters (zero=2|3); 0: all of them",
        legal="0, or a divisor of dp",
        domain=(0, 2),
        dense=0,
    )
    parity: int = word(
        0,
        "steps between the program's own comparisons of replicas by hash; 0: none",
        legal="0, or at least 1",
        domain=(0, 1, 2),
        dense=0,
    )
    grad_dtype: str = word(
        "model",
        "dtype in which gradients are added up and travel: the case's own, or float32",
        legal=("model", "float32"),
        after="dtype",
        dense="model",
    )
    master: str = word(
        "none", "copies of the parameters that the optimizer steps: none, or float32", legal=("none", "float32")
    )
    scaler: str = word(
        "none",
        "scale of the loss in backward (dtype=float16): none, static, or dynamic as Megatron's",
        legal=("none", "static", "dynamic"),
    )
    loss_scale: float = word(
        1.0,
        "the scale of the first step",
        legal="a power of two, at least 1",
        domain=(1.0, 8.0),
        follows=("scaler",),
        value=_loss_scale,
    )

    @property
    def shares_gradients(self) -> bool:
        """Whether a word replaces the single flat sum of all gradients."""
        return any(key not in ("parity", "loss_scale") for key, _ in not_default(DataParallel, self))

    @property
    def truth_depends_on_split(self) -> bool:
        """Whether the truth depends on the split; it does with a loss scale, since the parts in float16 decide which
        steps are skipped.
        """
        return self.scaler != "none" or super().truth_depends_on_split

    @property
    def layout(self) -> Layout:
        """The rank orders; with `shard`, dp also consists of the axes shard (one copy of parameters) and replica."""
        layout, size = super().layout, self.shard
        if not size:
            return layout
        parts = layout.orders[0].divide("dp", shard=size, replica=self.dp // size)
        return replace(layout, orders=(*layout.orders, parts))

    def problems(self) -> Iterator[Problem]:
        """Every broken rule: its word, the rule and a legal value."""
        zero, dp, shard = self.zero, self.dp, self.shard
        for key, legal in not_default(DataParallel, self) if not self.system.data_parallel else ():
            if key not in ("parity", "loss_scale"):
                owners = whose(lambda mode: mode.data_parallel)
                yield key, f"is implemented for mode={owners}, not for mode={self.mode}", legal
        if self.system.gathers_weights:
            yield from self._beside_gathered_weights()
        if zero not in (0, 1, 2, 3):
            yield "zero", "is not a stage of ZeRO", "zero=1"
        for key in ("bucket", "shard", "parity"):
            if getattr(self, key) < 0:
                yield key, "must not be negative", f"{key}=0"
        if self.bucket and zero >= 2:
            yield "bucket", f"zero={zero} reduces layer by layer and fills no buckets", "bucket=0"
        if shard and zero < 2:
            yield "shard", f"shares parameters among some data ranks, and zero={zero} shares none", "shard=0"
        if shard and dp % shard:
            yield "shard", f"must divide dp={dp}", f"shard={math.gcd(dp, shard)}"
        for key, legal in (("grad_dtype", "grad_dtype=model"), ("master", "master=none")):
            if getattr(self, key) == "float32" and self.dtype not in _NARROW:
                yield (key, f"is wider than the parameters, and dtype={self.dtype} is not narrower", legal)
        if self.grad_dtype == "float32" and self.master == "none":
            yield "grad_dtype", "master=none steps parameters by gradients of their own dtype", "grad_dtype=model"
        yield from self._layer_by_layer()
        yield from self._scaler_problems()

    def _beside_gathered_weights(self) -> Iterator[Problem]:
        mode = f"mode={self.mode}"
        if self.zero >= 2:
            yield "zero", f"shares parameters among data ranks, and {mode} gathers its own over wp", "zero=1"
        if self.wgrad != "plain":
            rule = f"leaves a gradient to the buffer of all, and {mode} reduces it over wp in its backward"
            yield "wgrad", rule, "wgrad=plain"
        if self.bucket and self.fuse_weights:
            rule = "is filled in the order of backward, and fuse_weights=true reduces all weights of a block at once"
            yield "bucket", rule, "bucket=0"

    def _layer_by_layer(self) -> Iterator[Problem]:
        zero = self.zero
        for key in ("no_sync", "prefetch"):
            if getattr(self, key) and zero < 2:
                rule = f"is about layers that are gathered and reduced one by one, and zero={zero} has none"
                yield key, rule, f"{key}=false"
        if zero >= 2 and self.pipeline_axes and not self.no_sync:
            stage = "a stage of {}={}".format(*next((axis, self.mesh[axis]) for axis in self.pipeline_axes))
            rule = f"{stage} keeps whole gradients of all its micro-batches, and sums them once (zero={zero})"
            yield "no_sync", rule, "no_sync=true"
        if self.wgrad != "plain" and zero >= 2:
            yield (
                "wgrad",
                f"zero={zero} sums a layer's gradients in its backward, whole as autograd has them",
                "wgrad=plain",
            )

    def _scaler_problems(self) -> Iterator[Problem]:
        scaler, scale = self.scaler, self.loss_scale
        if scaler != "none" and self.dtype != "float16":
            yield (
                "scaler",
                f"is for gradients of few exponents, and dtype={self.dtype} has as many as float32",
                "dtype=float16",
            )
        if scaler != "none" and self.master == "none":
            yield "scaler", "unscales gradients in float32, so that what was scaled is not lost again", "master=float32"
        if not scale >= 1 or math.isinf(scale) or math.frexp(scale)[0] != 0.5:
            yield "loss_scale", "must be a power of two, so that scaling rounds nothing", "loss_scale=65536.0"
        if scaler == "none" and scale != 1:
            yield "loss_scale", "scales with a scaler only, and scaler=none", "loss_scale=1.0"
