"""Which words are legal, each by itself and together: one rule a line, with the message that a user reads.

`problems` are rules of the core, `expert_problems` those about experts: how a router weighs and chooses, and what
follows its choice. Sources: modes.md sections 3.1 and 4 (divisibility of heads, vocabulary, sequence), Megatron-Core
`TransformerConfig`, InternEvo `initialize/launch.py`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from operator import attrgetter
from typing import Any, NamedTuple, Self

from shardproof.reference.errors import CaseError
from shardproof.reference.language.core import Core, whose
from shardproof.reference.language.groups import RankOrder
from shardproof.reference.language.words import LARGEST_SIZE, Problem, legal_values, multiple

_EMBEDDINGS = {"whole": "leaves it whole", "vocab": "splits the vocabulary"}
"""embedding= of the token table -> what a mode does that has only this one, in words."""
LARGEST_SEED = 2**64 - 1


def problems(case: Core) -> Iterator[Problem]:
    """Every broken rule: its word, the rule and a legal value."""
    for rules in (_domains, _model, _mesh, _training_problems):
        yield from rules(case)


class _Restricted(NamedTuple):
    """The words of a class of cases whose values are restricted.

    `lists`: words with a list of legal values, which a third party's mode may extend. `sizes`: integer words, and
    whether 0 is legal. `choices` and `numbers` read the values of all these words from a case.
    """

    lists: tuple[tuple[str, Collection[str]], ...]
    choices: Callable[[Core], tuple[object, ...]]
    sizes: dict[str, bool]
    numbers: Callable[[Core], tuple[int, ...]]

    @classmethod
    @functools.cache
    def of(cls, kind: Any) -> Self:
        """The words of this class of cases."""
        fields = dataclasses.fields(kind)
        lists = tuple((field.name, field.metadata["legal"]) for field in fields if legal_values(field))
        sizes = {field.name: bool(field.metadata["legal"]) for field in fields if type(field.default) is int}
        sizes.pop("seed")
        return cls(lists, attrgetter(*(name for name, _ in lists)), sizes, attrgetter(*sizes))


def _domains(case: Core) -> Iterator[Problem]:
    kind: Any = type(case)
    words = _Restricted.of(kind)
    for value, (key, known) in zip(words.choices(case), words.lists, strict=True):
        if value not in known:
            yield key, "is not a known word", "|".join(known)
    numbers = words.numbers(case)
    for (key, with_zero), number in zip(words.sizes.items(), numbers, strict=True) if min(numbers) < 1 else ():
        if not with_zero and number < 1:
            yield key, "must be at least 1", f"{key}=1"
    for key, number in zip(words.sizes, numbers, strict=True) if max(numbers) > LARGEST_SIZE else ():
        if number > LARGEST_SIZE:
            yield key, f"must be at most {LARGEST_SIZE}", f"{key}={LARGEST_SIZE}"
    if case.seed < 0:
        yield "seed", "must not be negative", "seed=0"
    if case.seed > LARGEST_SEED:
        yield "seed", "must be below 2**64, for torch's generators take no more", f"seed={LARGEST_SEED}"
    for key, legal in (("data", "data=corpus.txt"), ("load", "load=checkpoint"), ("save", "save=checkpoint")):
        if any(c.isspace() for c in getattr(case, key)):
            yield key, "must be a path without spaces, so that the case stays one line of words", legal
    if case.save and case.save == case.load:
        yield "save", "is the folder of load=, and a case that is run again would begin elsewhere", "save=another"


def _model(case: Core) -> Iterator[Problem]:
    if case.hidden % case.heads:
        yield "heads", f"must divide hidden={case.hidden}", f"hidden={_hidden(case)}"
    if case.heads % case.kv_heads:
        yield "kv_heads", f"must divide heads={case.heads}", f"kv_heads={_kv_heads(case)}"
    if case.positions == "rope" and case.hidden // case.heads % 2:
        yield "positions", "rope rotates pairs, so hidden/heads must be even", f"hidden={_hidden(case)}"
    if case.fuse_mlp and case.activation != "swiglu":
        yield "fuse_mlp", "fuses gate and up projection, which only swiglu has", "fuse_mlp=false"


def _mesh(case: Core) -> Iterator[Problem]:
    mode, name, tp, wp = case.system, case.mode, case.tp, case.wp
    gathers = mode.gathers_weights
    if not gathers and wp != 1:
        owners = whose(lambda one: one.gathers_weights)
        yield "wp", f"splits weights in mode={owners} only, not in mode={name}", "wp=1"
    if gathers and tp * case.dp % wp:
        yield "wp", f"must divide tp*dp={tp * case.dp}", f"wp={math.gcd(tp * case.dp, wp)}"
    split = wp if gathers else tp
    if gathers and case.hidden % wp:
        yield "hidden", f"must be a multiple of wp={wp}", f"hidden={_hidden(case)}"
    if not mode.uneven and case.heads % tp:
        yield "heads", f"must be a multiple of tp={tp}", f"tp={_tp_near(case)}"
    if mode.uneven:
        yield from _uneven(case)
    elif case.ffn % split:
        yield "ffn", f"must be a multiple of {mode.weight_axis}={split}", f"ffn={multiple(case.ffn, split)}"
    kv_rows = case.kv_heads * (case.hidden // case.heads) * (2 if case.fuse_qkv else 1)
    if gathers and kv_rows % wp:
        yield "wp", f"must divide the {kv_rows} rows of keys and values", f"wp={math.gcd(kv_rows, wp)}"
    if not mode.uneven and case.family != "gpt" and (case.vocab % split or case.vocab % tp):
        unit = math.lcm(split, tp)
        yield (
            "vocab",
            f"is not padded in family={case.family}, so {unit} must divide it",
            f"vocab={multiple(case.vocab, unit)}",
        )
    if not gathers and not mode.uneven and case.kv_heads % tp:
        yield "kv_heads", f"must be a multiple of tp={tp} in mode={name}", f"kv_heads={_kv_heads(case)}"
    if gathers and case.kv_heads % tp and tp % case.kv_heads:
        yield "kv_heads", f"must divide tp={tp} or be a multiple of it", f"kv_heads={_kv_heads(case)}"
    try:
        RankOrder.of(case.order, case.named_axes)
    except CaseError as error:
        yield error.key, error.rule, error.legal
    yield from _sequence(case)


def _tp_near(case: Core) -> int:
    """The legal tp closest to the case's own that divides heads; the smaller of two equally close."""
    for tp in sorted(range(1, case.heads + 1), key=lambda tp: abs(tp - case.tp)):
        if case.heads % tp == 0:
            with suppress(CaseError):
                changed: Any = dataclasses.replace
                return int(changed(case, tp=tp).tp)
    return math.gcd(case.kv_heads, case.tp)


def _uneven(case: Core) -> Iterator[Problem]:
    """The rules of modes whose ranks may hold unequal shares: no rank may be without one."""
    tp = case.tp
    if case.kv_heads < tp:
        legal = f"kv_heads={_kv_heads(case)}" if case.heads >= tp else f"tp={case.kv_heads}"
        yield "kv_heads", f"must be at least tp={tp}: a rank holds whole kv heads", legal
    head = () if case.tied else ("vocab",) if case.head == "gather" else ("hidden",)
    for key in ("ffn", *head):
        if getattr(case, key) < tp:
            yield key, f"must be at least tp={tp}: every rank holds a part", f"{key}={tp}"


def _sequence(case: Core) -> Iterator[Problem]:
    mode, name, tp = case.system, case.mode, case.tp
    if mode.sequence and case.row_tokens % tp:
        yield "seq", f"mode={name} splits it over tp={tp}", f"seq={multiple(case.seq, tp)}"
    if case.head not in mode.heads:
        yield "head", f"is not a form of mode={name}", "|".join(mode.heads)
    if case.embedding not in mode.embeddings:
        rule = "splits it" if case.embedding == "whole" else _EMBEDDINGS[mode.embeddings[0]]
        yield "embedding", f"mode={name} {rule}", f"embedding={mode.embeddings[0]}"
    if case.tied and case.embedding == "hidden":
        yield "embedding", "tied=true shares it with the head, which splits the vocabulary", "embedding=vocab"
    if case.head == "local" and case.cross_entropy == "fused":
        yield "cross_entropy", "head=local computes the loss without a collective to fuse", "cross_entropy=unfused"
    if case.fuse_weights and not mode.gathers_weights:
        owners = whose(lambda one: one.gathers_weights)
        yield "fuse_weights", f"gathers a block's weights at once, which only mode={owners} does", "fuse_weights=false"


def _training_problems(case: Core) -> Iterator[Problem]:
    if not case.lr > 0 or not math.isfinite(case.lr):
        yield "lr", "must be a positive number", "lr=1.0"
    if not case.clip >= 0:
        yield "clip", "must be 0 (off) or a positive gradient norm", "clip=0.1"
    if not 0 <= case.label_smoothing < 1:
        yield "label_smoothing", "must lie in [0, 1)", "label_smoothing=0.1"
    if case.label_smoothing and case.vocab == 1:
        yield "label_smoothing", "spreads over the other tokens, and vocab=1 has none", "label_smoothing=0.0"
    if case.optimizer == "adamw" and case.dtype == "float16" and case.master == "none":
        yield "optimizer", "adamw squares gradients, which underflow to 0 in dtype=float16", "dtype=bfloat16"


def _hidden(case: Core) -> int:
    """A legal hidden close to the given one: whole heads, even ones for rope, and whole shards in isp."""
    head = 2 * case.heads if case.positions == "rope" else case.heads
    return multiple(case.hidden, math.lcm(head, case.wp))


def _kv_heads(case: Core) -> int:
    """The legal kv_heads closest to the given one: a divisor of heads that tp divides. In autotp it need only be at
    least tp; in isp it may be a divisor of tp, since kv heads are repeated.
    """
    heads, tp, mode = case.heads, case.tp, case.system
    divisors = [d for d in range(1, heads + 1) if heads % d == 0]
    legal = [d for d in divisors if d % tp == 0 or (mode.gathers_weights and tp % d == 0) or (mode.uneven and d >= tp)]
    return min(legal or divisors, key=lambda d: abs(d - case.kv_heads))


SKEW_PARTS = 16
"""`skew` is a multiple of one over this number."""


def expert_problems(case: Core, plain: Mapping[str, Any]) -> Iterator[Problem]:
    """Every broken rule: its word, the rule and a legal value; `plain` are the defaults of the words."""
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
