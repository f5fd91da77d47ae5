"""What makes a case legal: one rule a line, each with the message that a user reads when it is broken.

Works on the plain values of a case, so that it knows nothing of the class. Sources: modes.md sections 3.1 and 4
(divisibility of heads, vocabulary, sequence), Megatron-Core `TransformerConfig`, InternEvo `initialize/launch.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from reference.case.context import METHODS, ORDERS
from reference.case.modes import MODES, mode_of, whose
from reference.case.pipeline import SCHEDULES
from reference.case.randomness import INITIAL, SOURCES
from reference.case.recompute import METHODS as RECOMPUTE_METHODS
from reference.case.schemes import SCHEMES, Problem
from reference.case.variants import VARIANTS, lack
from reference.errors import CaseError
from reference.groups import RankOrder

__all__ = ["LARGEST_SIZE", "check", "check_word", "legal_words", "read", "write"]

_WORDS: dict[str, tuple[str, ...]] = {
    "cp_comm": METHODS,
    "cp_slices": ORDERS,
    "schedule": SCHEDULES,
    "random": SOURCES,
    "init": INITIAL,
    "family": ("gpt", "internlm2", "opt", "llama"),
    "positions": ("learned", "rope"),
    "norm": ("layernorm", "rmsnorm"),
    "activation": ("gelu", "swiglu", "relu"),
    "delivery": ("tensors", "flat", "local"),
    "embedding": ("vocab", "hidden", "whole"),
    "head": ("parallel", "gather", "exchange", "local", "sum"),
    "cross_entropy": ("unfused", "fused"),
    "recompute": ("none", "selective", "full"),
    "recompute_method": RECOMPUTE_METHODS,
    "optimizer": ("sgd", "adamw"),
    "wgrad": ("plain", "fused", "deferred"),
    "grad_dtype": ("model", "float32"),
    "master": ("none", "float32"),
    "scaler": ("none", "static", "dynamic"),
    "dtype": ("float64", "float32", "bfloat16", "float16"),
}
_SIZES = "tp dp pp cp cp_inner wp chunks layers hidden heads kv_heads ffn vocab seq batch micro steps".split()

_EMBEDDINGS = {"whole": "leaves it whole", "vocab": "splits the vocabulary"}
"""What a mode does with the token table that has one form of it alone."""

LARGEST_SIZE = 2**31 - 1
"""Of every whole number but the seed: what torch and numpy take as a size everywhere."""
LARGEST_SEED = 2**64 - 1


def legal_words() -> dict[str, tuple[str, ...]]:
    """Key -> its legal values, for the keys whose values are words."""
    return {"mode": tuple(MODES), **_WORDS, "variant": tuple(VARIANTS)}


def check(values: Mapping[str, Any]) -> None:
    """Raise CaseError for the first broken rule of these values."""
    further = (scheme.problems for scheme in SCHEMES.values())
    for rules in (_domains, _model, _mesh, _training, *further, _variant):
        for key, rule, legal in rules(values):
            raise CaseError(key, write(values[key]), rule, legal)


def _domains(v: Mapping[str, Any]) -> Iterator[Problem]:
    for key, words in {"mode": tuple(MODES), **_WORDS}.items():
        if v[key] not in words:
            yield key, "is not a known word", "|".join(words)
    for key in _SIZES:
        if v[key] < 1:
            yield key, "must be at least 1", f"{key}=1"
    for key, value in v.items():
        if type(value) is int and value > LARGEST_SIZE and key != "seed":
            yield key, f"must be at most {LARGEST_SIZE}", f"{key}={LARGEST_SIZE}"
    if v["seed"] < 0:
        yield "seed", "must not be negative", "seed=0"
    if v["seed"] > LARGEST_SEED:
        yield "seed", "must be below 2**64, for torch's generators take no more", f"seed={LARGEST_SEED}"
    for key, legal in (("data", "data=corpus.txt"), ("load", "load=checkpoint"), ("save", "save=checkpoint")):
        if any(c.isspace() for c in v[key]):
            yield key, "must be a path without spaces, so that the case stays one line of words", legal
    if v["save"] and v["save"] == v["load"]:
        yield "save", "is the folder of load=, and a case that is run again would begin elsewhere", "save=another"


def _model(v: Mapping[str, Any]) -> Iterator[Problem]:
    if v["hidden"] % v["heads"]:
        yield "heads", f"must divide hidden={v['hidden']}", f"hidden={_hidden(v)}"
    if v["heads"] % v["kv_heads"]:
        yield "kv_heads", f"must divide heads={v['heads']}", f"kv_heads={_kv_heads(v)}"
    if v["positions"] == "rope" and v["hidden"] // v["heads"] % 2:
        yield "positions", "rope rotates pairs, so hidden/heads must be even", f"hidden={_hidden(v)}"
    if v["fuse_mlp"] and v["activation"] != "swiglu":
        yield "fuse_mlp", "fuses gate and up projection, which only swiglu has", "fuse_mlp=false"
    if v["packed"] and v["delivery"] != "local":
        yield "delivery", "Megatron's broadcasts know no packs", "delivery=local"
    if v["packed"] and v["positions"] == "learned":
        yield "packed", "packs restart positions inside a row, which needs rotary positions", "positions=rope"


def _mesh(v: Mapping[str, Any]) -> Iterator[Problem]:
    mode, name, tp, wp = mode_of(v), v["mode"], v["tp"], v["wp"]
    gathers = mode.gathers_weights
    if not gathers and wp != 1:
        owners = whose(lambda one: one.gathers_weights)
        yield "wp", f"splits weights in mode={owners} only, not in mode={name}", "wp=1"
    if gathers and tp * v["dp"] % wp:
        yield "wp", f"must divide tp*dp={tp * v['dp']}", f"wp={math.gcd(tp * v['dp'], wp)}"
    split = wp if gathers else tp
    if gathers and v["hidden"] % wp:
        yield "hidden", f"must be a multiple of wp={wp}", f"hidden={_hidden(v)}"
    if mode.uneven:
        yield from _uneven(v)
    elif v["ffn"] % split:
        yield "ffn", f"must be a multiple of {mode.weight_axis}={split}", f"ffn={_multiple(v['ffn'], split)}"
    kv_rows = v["kv_heads"] * (v["hidden"] // v["heads"]) * (2 if v["fuse_qkv"] else 1)
    if gathers and kv_rows % wp:
        yield "wp", f"must divide the {kv_rows} rows of keys and values", f"wp={math.gcd(kv_rows, wp)}"
    if not mode.uneven and v["family"] != "gpt" and (v["vocab"] % split or v["vocab"] % tp):
        unit = math.lcm(split, tp)
        yield (
            "vocab",
            f"is not padded in family={v['family']}, so {unit} must divide it",
            f"vocab={_multiple(v['vocab'], unit)}",
        )
    if not mode.uneven and v["heads"] % tp:
        yield "heads", f"must be a multiple of tp={tp}", f"tp={math.gcd(v['kv_heads'], tp)}"
    if not gathers and not mode.uneven and v["kv_heads"] % tp:
        yield "kv_heads", f"must be a multiple of tp={tp} in mode={name}", f"kv_heads={_kv_heads(v)}"
    if gathers and v["kv_heads"] % tp and tp % v["kv_heads"]:
        yield "kv_heads", f"must divide tp={tp} or be a multiple of it", f"kv_heads={_kv_heads(v)}"
    try:
        RankOrder.of(v["order"], {"tp": tp, "cp": v["cp"], "ep": 1, "dp": v["dp"], "pp": v["pp"]})
    except CaseError as error:
        yield error.key, error.rule, error.legal
    yield from _sequence(v)


def _uneven(v: Mapping[str, Any]) -> Iterator[Problem]:
    """Shares of ranks may differ, and none is empty."""
    tp = v["tp"]
    if v["kv_heads"] < tp:
        legal = f"kv_heads={_kv_heads(v)}" if v["heads"] >= tp else f"tp={v['kv_heads']}"
        yield "kv_heads", f"must be at least tp={tp}: a rank holds whole kv heads", legal
    head = () if v["tied"] else ("vocab",) if v["head"] == "gather" else ("hidden",)
    for key in ("ffn", *head):
        if v[key] < tp:
            yield key, f"must be at least tp={tp}: every rank holds a part", f"{key}={tp}"


def _sequence(v: Mapping[str, Any]) -> Iterator[Problem]:
    mode, name, tp = mode_of(v), v["mode"], v["tp"]
    length = v["seq"] * v["batch"] if v["packed"] else v["seq"]
    if mode.sequence and length % tp:
        yield "seq", f"mode={name} splits it over tp={tp}", f"seq={_multiple(v['seq'], tp)}"
    if v["head"] not in mode.heads:
        yield "head", f"is not a form of mode={name}", "|".join(mode.heads)
    if v["embedding"] not in mode.embeddings:
        rule = "splits it" if v["embedding"] == "whole" else _EMBEDDINGS[mode.embeddings[0]]
        yield "embedding", f"mode={name} {rule}", f"embedding={mode.embeddings[0]}"
    if v["tied"] and v["embedding"] == "hidden":
        yield "embedding", "tied=true shares it with the head, which splits the vocabulary", "embedding=vocab"
    if v["head"] == "local" and v["cross_entropy"] == "fused":
        yield "cross_entropy", "head=local computes the loss without a collective to fuse", "cross_entropy=unfused"
    if v["fuse_weights"] and not mode.gathers_weights:
        owners = whose(lambda one: one.gathers_weights)
        yield "fuse_weights", f"gathers a block's weights at once, which only mode={owners} does", "fuse_weights=false"


def _training(v: Mapping[str, Any]) -> Iterator[Problem]:
    if not v["lr"] > 0 or not math.isfinite(v["lr"]):
        yield "lr", "must be a positive number", "lr=1.0"
    if not v["clip"] >= 0:
        yield "clip", "must be 0 (off) or a positive gradient norm", "clip=0.1"
    if not 0 <= v["label_smoothing"] < 1:
        yield "label_smoothing", "must lie in [0, 1)", "label_smoothing=0.1"
    if v["label_smoothing"] and v["vocab"] == 1:
        yield "label_smoothing", "spreads over the other tokens, and vocab=1 has none", "label_smoothing=0.0"
    if v["optimizer"] == "adamw" and v["dtype"] == "float16" and v["master"] == "none":
        yield "optimizer", "adamw squares gradients, which underflow to 0 in dtype=float16", "dtype=bfloat16"


def _variant(v: Mapping[str, Any]) -> Iterator[Problem]:
    if v["variant"] and v["variant"] not in VARIANTS:
        yield "variant", "is not a known variant", " ".join(VARIANTS)
    elif v["variant"] and (rule := lack(v)):
        yield "variant", rule, "variant="


def _hidden(v: Mapping[str, Any]) -> int:
    """A legal hidden near the one given: whole heads, even ones for rope, and whole shards in isp."""
    head = 2 * v["heads"] if v["positions"] == "rope" else v["heads"]
    return _multiple(v["hidden"], math.lcm(head, v["wp"]))


def _kv_heads(v: Mapping[str, Any]) -> int:
    """A legal kv_heads near the one given: divides heads, and splits over tp, evenly unless in autotp; in isp it may be
    repeated to tp.
    """
    heads, tp, mode = v["heads"], v["tp"], mode_of(v)
    divisors = [d for d in range(1, heads + 1) if heads % d == 0]
    legal = [d for d in divisors if d % tp == 0 or (mode.gathers_weights and tp % d == 0) or (mode.uneven and d >= tp)]
    return min(legal or divisors, key=lambda d: abs(d - v["kv_heads"]))


def _multiple(size: int, unit: int) -> int:
    """The smallest multiple of `unit` that is at least `size`."""
    return -(-size // unit) * unit


def read(key: str, text: str, kind: type) -> int | float | bool | str:
    """The value that `text` writes for a key of this type. Raises CaseError when it writes none."""
    if kind is bool:
        if text not in ("true", "false"):
            raise CaseError(key, text, "must be true or false", f"{key}=true")
        return text == "true"
    if kind is str:
        return text
    try:
        value: int | float = kind(text)
    except ValueError:
        legal = f"{key}=1" if kind is int else f"{key}=0.1"
        raise CaseError(key, text, f"must be {'a whole' if kind is int else 'a'} number", legal) from None
    return value


def check_word(key: str, value: object) -> None:
    """Raise CaseError when a key takes one of a list of words, and this is none of them."""
    known = {"mode": tuple(MODES), **_WORDS}.get(key)
    if known is not None and value not in known:
        raise CaseError(key, value, "is not a known word", "|".join(known))


def write(value: int | float | bool | str) -> str:
    """The text that `read` turns into this value."""
    return str(value).lower() if isinstance(value, bool) else str(value)
