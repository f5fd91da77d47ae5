"""Which words about a layer's experts are legal together: how a router weighs and chooses, what follows its choice."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from shardproof.reference.language.core import Core
from shardproof.reference.language.words import Problem

SKEW_PARTS = 16
"""A share of tokens is a number of these parts."""


def problems(case: Core, plain: Mapping[str, Any]) -> Iterator[Problem]:
    """Key, the rule that it breaks and a legal value, of every broken rule; `plain` are the defaults of the words."""
    if case.top_k > case.experts:
        yield "top_k", f"must be at most experts={case.experts}", f"top_k={case.experts}"
    if case.top_k == 1 and case.router == "softmax":
        rule = "gives the only chosen expert the weight 1, and the router no gradient (top_k=1)"
        yield "router", rule, "router=pre-softmax"
    if not case.router_scale > 0 or math.isinf(case.router_scale):
        yield "router_scale", "must be a positive number", "router_scale=1.0"
    for key in ("bias_rate", "aux_loss", "sequence_loss", "global_loss", "z_loss", "capacity"):
        if not 0 <= getattr(case, key) < math.inf:
            yield key, "must be 0 or a positive number", f"{key}=0.0"
    yield from _choices(case, plain)
    yield from _loads(case, plain)
    if case.routing == "learned" and case.dtype != "float64":
        rule = f"compares choices exactly, and rounding in dtype={case.dtype} makes other ones"
        yield "routing", rule, "routing=skewed"
    if case.shared_gate and not case.shared_ffn:
        yield "shared_gate", "is for a shared expert, and shared_ffn=0 has none", "shared_gate=false"
    wide = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
    if case.router_dtype != "model" and wide[case.router_dtype] < wide.get(case.dtype, 8):
        yield "router_dtype", f"must not be narrower than dtype={case.dtype}", "router_dtype=model"


def _choices(case: Core, plain: Mapping[str, Any]) -> Iterator[Problem]:
    groups, kept, count = case.router_groups, case.kept_groups, case.top_k
    if case.experts % groups:
        yield (
            "router_groups",
            f"must divide experts={case.experts}",
            f"router_groups={math.gcd(case.experts, groups)}",
        )
    elif kept > groups or (groups > 1 and (count % kept or count // kept > case.experts // groups)):
        rule = f"of {groups} groups must share top_k={count} evenly, at most {case.experts // groups} a group"
        yield "kept_groups", rule, f"kept_groups={min(groups, count)}"
    for key in ("router_groups", "bias_rate"):
        if case.routing != "learned" and getattr(case, key) != plain[key]:
            rule = f"changes what the router chooses, and routing={case.routing} leaves it no choice"
            yield key, rule, f"{key}={plain[key]}"
    if case.global_loss and case.routing == "learned":
        rule = "counts tokens of other data ranks, whose choices the dense model has not made yet (routing=learned)"
        yield "global_loss", rule, "global_loss=0.0"
    if case.balance_of != "all":
        if case.sequence_loss or case.global_loss:
            yield "balance_of", "is of aux_loss and z_loss; sequence_loss and global_loss are of all", "balance_of=all"
        elif not (case.aux_loss or case.z_loss):
            yield "balance_of", "is about balance losses, and the case has none", "balance_of=all"
    if case.bias_rate and case.router != "sigmoid":
        yield "bias_rate", f"is added to sigmoids, and router={case.router} has none", "router=sigmoid"
    for key in ("load", "save") if case.bias_rate else ():
        if getattr(case, key):
            yield "bias_rate", f"changes a bias that no checkpoint of {key}= holds", "bias_rate=0.0"


def _loads(case: Core, plain: Mapping[str, Any]) -> Iterator[Problem]:
    if case.skew and case.routing != "equal":
        yield "skew", f"is a share of equal loads, and routing={case.routing} has others", "skew=0.0"
    if not 0 <= case.skew <= 1 or case.skew * SKEW_PARTS % 1:
        yield "skew", f"must be a number of {SKEW_PARTS}ths from 0 to 1", "skew=0.25"
    for key in ("drop", "pad", "capacity_of") if not case.capacity else ():
        if getattr(case, key) != plain[key]:
            legal = f"{key}={str(plain[key]).lower()}"
            yield key, "is about rows beyond a capacity, and capacity=0.0 takes all", legal
    if case.pad and case.capacity_of != "rank":
        yield "pad", "has every rank send as many rows, and capacity_of=micro-batch lets ranks compete", "pad=false"
    if case.capacity and case.drop == "score" and case.dtype != "float64":
        rule = f"compares weights exactly, and rounding in dtype={case.dtype} makes others the smallest"
        yield "drop", rule, "drop=position"
    if case.pad and case.dispatcher != "alltoall":
        yield "pad", f"is about rows, and dispatcher={case.dispatcher} sends none", "dispatcher=alltoall"
