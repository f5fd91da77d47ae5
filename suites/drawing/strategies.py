"""Hypothesis strategies that draw only valid, non-degenerate cases.

`cases` are non-degenerate by construction: they have axes of unequal size, odd factors, several micro-batches and
steps, batch > 1, grouped heads and uneven masks. The reference draws biases and norm weights away from their defaults.
Every draw is made in the driver, never inside a rank. Simple values come first, so that failures shrink to small cases.

`large_cases` have sizes that users train: many tokens in a step, or a wide model. Rounding grows with the number of
terms of a sum, so what holds for a few dozen tokens says little of thousands. Boolean words come in rows
(`boolean_rows`), in which any two words have all four pairs of values. Each word is true in n/2 of n rows, in another
set than every other word, and never in the first row (Kleitman and Spencer 1973).
"""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

from hypothesis import reject
from hypothesis import strategies as st

from shardproof.harness.engines.faults.races import Schedule
from shardproof.reference.case import Case, CaseError
from shardproof.reference.case.domains import domains, repair_words, words_of
from shardproof.reference.features import FEATURES, PARTS
from shardproof.reference.language.core import MODES, Core
from shardproof.reference.language.words import declared_words

NOT_DRAWN = {
    "preset": "stands for other words, each of which is drawn",
    "load": "names a folder (shardproof.suites.test_checkpoints draws pairs of layouts)",
    "save": "names a folder (shardproof.suites.test_checkpoints draws pairs of layouts)",
    "data": "names a file; the data of a case without it are drawn by its seed",
    "variant": "makes the implementation wrong",
    "scaler": "has scales of its own for each model: between them rounding decides which step is skipped",
    "loss_scale": "scales with a scaler only",
}
"""Words of the case language that `every_word` leaves at their defaults, and why."""

WORLDS = (2, 3, 4, 6)
"""World sizes that a suite draws from unless `--worlds` says otherwise."""

_DOMAINS: Mapping[str, Sequence[Any]] = {
    **domains(),
    "wp": (1, 2, 3, 4, 6),
    "micro": (1, 2, 3, 4, 5, 6),
    "group": (0, 2, 3, 4),
    "recompute_layers": (1, 2, 3, 4),
    "shard": (0, 1, 2, 3),
    "cp_comm": (*domains()["cp_comm"], *("alltoall-ring",) * 4),  # allowed for few ranks and heads
    "bucket": (0, 300, 2000),
    "parity": (0, 1, 2),
    "first_layers": (0, 1, 2),
    "last_layers": (0, 1, 2),
    "dropout": (0.0, 0.0, 0.1, 0.3),
    "attention_dropout": (0.0, 0.0, 0.1, 0.3),
    "routing": (*domains()["routing"], *("learned",) * 3),  # the only one with groups and a bias
    "capacity": (0.0, 0.0, 0.5, 1.0, 1.5, 8.0),
    "ep": (1, 2, 3, 2, 3, 4),
    "bias_rate": (0.0, 0.1, 0.1),
    "router_groups": (1, 2, 4),
}
"""The values that are drawn, or that a rule may propose instead: more than experiments try."""
_NONE: Mapping[str, bool] = MappingProxyType({})
_RARELY = (False, False, False, True)
_STEPS = ((2,) * 9 + (1,) * 7 + (3,) * 5 + (4, 5, 6, 7, 8)) * 2 + (20,)
"""The number of steps of a case: any up to 8; one case in 53 has 20, which costs as much as ten others."""


def meshes(worlds: Sequence[int] = WORLDS) -> list[tuple[int, int]]:
    """(tp, dp) of every mesh with tp > 1 whose world is allowed. The two are never equal, so a group of one axis cannot
    be taken for one of the other.
    """
    return [
        (tp, world // tp)
        for world in sorted(worlds)
        for tp in range(2, world + 1)
        if world % tp == 0 and tp * tp != world
    ]


def _micro(tp: int, dp: int) -> tuple[int, int]:
    """Two numbers of micro-batches that differ from the sizes of both axes, so no factor can be taken for another."""
    fewest, *more = (micro for micro in (2, 3, 4) if micro not in (tp, dp))
    return fewest, more[0] if more and tp * dp < 6 else fewest


def schedules() -> st.SearchStrategy[Schedule]:
    """Draw which rank runs next, and which results arrive before their wait. Draws shrink to ranks in the order in
    which they are ready, with every result at its wait.
    """
    return st.builds(
        Schedule,
        turns=st.lists(st.integers(0, 5), max_size=200).map(tuple),
        early=st.lists(st.booleans(), max_size=60).map(tuple),
    )


@st.composite
def cases(
    draw: st.DrawFn,
    /,
    mode: str,
    worlds: Sequence[int] = WORLDS,
    flags: Mapping[str, bool] = _NONE,
    parts: Collection[str] = (),
    **fixed: Any,
) -> Case:
    """Draw a valid case of this mode; `fixed` words override what would be drawn, `flags` are its boolean words.

    What flags imply is drawn too (packed data are InternLM2's, a fused MLP is gated). If the mode can have some of the
    `parts` (`reference.features.PARTS`), about one case in four has one.
    """
    tp, dp = draw(st.sampled_from(meshes(worlds)), label="tp, dp")
    family = "internlm2" if flags.get("packed") else fixed.get("family")
    family = str(family or draw(st.sampled_from(("gpt", "internlm2")), label="family"))
    words: dict[str, Any] = {"mode": mode, "tp": tp, "dp": dp, "family": family}
    words |= draw(_shape(mode, tp, dp, family), label="shape")
    words |= draw(_talk(mode, family, flags), label="talk")
    words |= {
        "micro": _micro(tp, dp)[draw(st.integers(0, 1), label="more micro-batches")],
        "steps": draw(st.integers(2, 3), label="steps"),
        "label_smoothing": draw(st.sampled_from((0.0, 0.1)), label="label_smoothing"),
        "lr": 0.1,
        "seed": draw(st.integers(0, 2**31 - 1), label="seed"),
    }
    case = Case.of(**{**words, **fixed})
    here = [part for part in parts if PARTS[part] not in fixed and mode in modes_with(part)]
    if here and (part := draw(st.sampled_from((*("",) * 3 * len(here), *here)), label="part")):
        case = draw(_with_feature(case, part, {*fixed, *flags}))
    return case


@st.composite
def every_word(
    draw: st.DrawFn, /, mode: str, worlds: Sequence[int] = WORLDS, needs: Collection[str] = (), **fixed: Any
) -> Case:
    """Draw a valid case of this mode in any word but those NOT_DRAWN, with the parts that it `needs`."""
    family = draw(st.sampled_from(("gpt", "internlm2", "opt", "llama")), label="family")
    steps = fixed.get("steps") or draw(st.sampled_from(_STEPS), label="steps")
    dtype = fixed.get("dtype") or draw(st.sampled_from(("float64", "float32", "bfloat16", "float16")), label="dtype")
    words: dict[str, Any] = {
        "family": family,
        "steps": steps,
        "dtype": dtype,
        **({"micro": 1} if steps > 4 or draw(st.sampled_from(_RARELY), label="one micro-batch") else {}),
        "optimizer": "sgd" if dtype == "float16" else draw(st.sampled_from(("sgd", "adamw")), label="optimizer"),
        "lr": draw(st.sampled_from((1.0, 0.1, 0.01, 0.001)), label="lr"),
        "clip": draw(st.sampled_from((0.0, 0.05, 1.0, 1000.0)), label="clip"),
        "label_smoothing": draw(st.sampled_from((0.0, 0.1, 0.3)), label="label_smoothing"),
    }
    if steps > 8:
        words["layers"] = 1
    case = draw(cases(mode, worlds, **{**words, **fixed}))
    for name in sorted(FEATURES, key=lambda name: (name in PARTS, not _axes(FEATURES[name]))):
        optional = name in PARTS and name not in needs
        if optional and (PARTS[name] in fixed or not draw(st.sampled_from(_RARELY), label=f"with {name}")):
            continue
        case = draw(_with_feature(case, name, fixed))
    if not all(getattr(case, PARTS[part]) for part in needs):
        reject()
    order = "-".join(draw(st.permutations([*case.named_axes]), label="order"))
    try:
        return case.but(order=order)
    except CaseError:
        return case  # weights are split over neighbouring ranks


@st.composite
def _with_feature(draw: st.DrawFn, /, case: Case, name: str, fixed: Collection[str]) -> Case:
    """Draw words of a feature for the case, with others changed as the rules propose.

    If that makes no legal case, the case gets only the feature's own size and axes, or stays as it is. The axis of a
    feature takes the ranks of another axis, so the number of ranks stays.
    """
    owner, part = FEATURES[name], PARTS.get(name)
    words, has = dict[str, Any](), dict[str, Any]()
    if part:
        has = {part: draw(st.sampled_from([size for size in _DOMAINS[part] if size]), label=part)}
    for axis in _axes(owner):
        other = draw(st.sampled_from(("", "dp", "tp")), label=f"axis whose ranks are {axis} ranks")
        words |= {other: 1, axis: case.mesh[other]} if other else {}
    free = [word for word in declared_words(owner) if word not in (*case.mesh, *has, *fixed, *NOT_DRAWN)]
    drawn = {word: draw(st.sampled_from(_DOMAINS[word]), label=word) for word in free}
    kept = {word: getattr(case, word) for word in (*case.mesh, "mode", "steps", "dtype", *fixed)}
    for more in (drawn, {}):
        words_of_case = repair_words({**words_of(case), **more, **has}, {**kept, **words}, _DOMAINS)
        words_of_case = None if words_of_case and part and not words_of_case[part] else words_of_case
        if words_of_case or not (words or has):
            break
    return Case(**words_of_case) if words_of_case else case


@cache
def modes_with(*parts: str) -> list[str]:
    """The modes whose cases can have all of these parts."""
    has = {PARTS[part]: next(filter(None, _DOMAINS[PARTS[part]])) for part in parts}
    plain = {mode: words_of(Case.of(**MODES[mode].presets[0], mode=mode)) for mode in MODES}
    return [mode for mode, words in plain.items() if repair_words(words, {**has, "mode": mode}, _DOMAINS)]


def _axes(owner: type[Core]) -> list[str]:
    return [word for word, field in declared_words(owner).items() if field.metadata["axis"]]


@st.composite
def _shape(draw: st.DrawFn, /, mode: str, tp: int, dp: int, family: str) -> dict[str, Any]:
    """Sizes of the model and of the batch that split over this mesh."""
    words: dict[str, Any] = {}
    split = tp
    if MODES[mode].gathers_weights:
        words["wp"] = draw(st.sampled_from([w for w in (2, 3, 4, 6) if tp * dp % w == 0]), label="wp")
        split = math.lcm(tp, words["wp"])
    groups_per_rank, queries = draw(st.integers(1, 2)), draw(st.sampled_from((1, 3, 2)))
    kv_heads = tp * groups_per_rank
    if MODES[mode].gathers_weights and draw(st.booleans(), label="fewer kv heads than ranks"):
        kv_heads = draw(st.sampled_from([heads for heads in range(1, tp) if tp % heads == 0]))
        queries *= tp // kv_heads
    head_dim = draw(st.sampled_from((4, 6)))  # with both features a q/k layernorm would leave nothing but signs
    if kv_heads * head_dim % split:
        head_dim *= split
    words |= {"heads": kv_heads * queries, "kv_heads": kv_heads, "hidden": kv_heads * queries * head_dim}
    words["ffn"] = split * draw(st.sampled_from((3, 5, 8)))
    if MODES[mode].uneven and dp == 1:  # shares that differ
        more = draw(st.integers(0, tp - 1), label="ranks with one kv head more")
        words |= {key: words[key] // kv_heads * (kv_heads + more) for key in ("heads", "kv_heads", "hidden")}
        words["ffn"] += draw(st.integers(0, tp - 1), label="ranks with one inner feature more")
    # Above 257 tokens plain text meets every shard; gpt pads, also to a last shard that is padding only.
    uneven = family == "gpt" and (not MODES[mode].uneven or dp == 1)
    words["vocab"] = draw(st.sampled_from((389, 641))) if uneven else split * draw(st.sampled_from((131, 173)))
    words["layers"] = draw(st.integers(1, 3), label="layers")
    words["seq"] = draw(st.sampled_from((5, 7, 4))) * (tp if MODES[mode].sequence else 1)
    words["batch"] = draw(st.integers(2, 3))
    return words


@st.composite
def _talk(draw: st.DrawFn, /, mode: str, family: str, flags: Mapping[str, bool]) -> dict[str, Any]:
    """Choices that change which collectives a mode issues."""

    def flag(word: str) -> bool:
        return flags[word] if word in flags else draw(st.booleans(), label=word)

    packed = family != "gpt" and flag("packed")
    rope = packed or draw(st.booleans(), label="rope")
    words: dict[str, Any] = {
        "packed": packed,
        "positions": "rope" if rope else "learned",
        "norm": draw(st.sampled_from(("layernorm", "rmsnorm"))),
        "activation": "swiglu" if flags.get("fuse_mlp") else draw(st.sampled_from(("gelu", "swiglu", "relu"))),
        "bias": flag("bias"),
        "tied": flag("tied"),
        "qk_norm": flag("qk_norm"),
        "fuse_qkv": flag("fuse_qkv"),
        "overlap": flag("overlap"),
        "recompute": draw(st.sampled_from(("none", "full", "selective"))),
        "cross_entropy": draw(st.sampled_from(("unfused", "fused"))),
    }
    words["fuse_mlp"] = words["activation"] == "swiglu" and flag("fuse_mlp")
    if MODES[mode].measures:
        words["embedding"] = "vocab" if words["tied"] else draw(st.sampled_from(("hidden", "vocab")))
        words["metric"] = flag("metric")
    elif not packed:
        words["delivery"] = draw(st.sampled_from(("tensors", "flat", "local")))
        words["attention_mask"] = flag("attention_mask")
    words["head"] = draw(st.sampled_from(MODES[mode].heads))
    if MODES[mode].gathers_weights:
        words["fuse_weights"] = flag("fuse_weights")
        if words["head"] == "local":
            words["cross_entropy"] = "unfused"
    return words


_EVERYWHERE = ("packed", "bias", "tied", "qk_norm", "fuse_qkv", "overlap", "fuse_mlp")
_ROWS = 6
"""Enough for ten words: there are ten sets of three rows among five."""


def boolean_rows(mode: str) -> tuple[Mapping[str, bool], ...]:
    """The boolean words of cases of this mode, row by row.

    Packed data have no attention mask (Megatron's dense one), so a row with both becomes two rows with one each.
    """
    words: tuple[str, ...] = (*_EVERYWHERE, "metric" if MODES[mode].measures else "attention_mask")
    words += ("fuse_weights",) if MODES[mode].gathers_weights else ()
    sets = dict(zip(words, itertools.combinations(range(1, _ROWS), _ROWS // 2), strict=False))
    combinations: list[Mapping[str, bool]] = []
    for row in range(_ROWS):
        values = {word: row in true for word, true in sets.items()}
        if values["packed"] and values.get("attention_mask"):
            combinations += [values | {"packed": False}, values | {"attention_mask": False}]
        else:
            combinations.append(values)
    return tuple(combinations)


TOKENS = (1024, 4096, 16_384)
"""The approximate numbers of tokens in a step of a long case."""
HIDDEN = (256, 1024, 2048)
"""The approximate hidden sizes of a wide case."""
_LONGEST = 512
"""The most tokens of a sequence that replaces a short one, since scores grow with the square."""
_PACKED = 2048
"""The most tokens of a packed row, which is one sequence to the dense model: 12 heads have scores of 400 MB."""
_MOST_STEPS = 2
_INNER = 4096
"""The largest number of inner features of an MLP."""


@st.composite
def large_cases(draw: st.DrawFn, /, mode: str, **fixed: Any) -> Case:
    """A case of this mode as `every_word` draws them, with many tokens or a wide model, and two steps at most."""
    case = draw(every_word(mode, **fixed))
    words = draw(_long(case) if draw(st.booleans(), label="many tokens") else _wide(case))
    try:
        return case.but(**words, steps=case.steps if "steps" in fixed else min(case.steps, _MOST_STEPS))
    except CaseError:
        reject()  # a rule ties a size to another word


@st.composite
def _long(draw: st.DrawFn, /, case: Case) -> dict[str, Any]:
    """Longer sequences and more of them: about as many tokens in a step as one of TOKENS."""
    longest = max(_LONGEST // case.seq, 1)
    times = draw(st.sampled_from([times for times in (1, 4, 16, 64) if times <= longest]), label="longer")
    now = case.seq * times * case.micro * case.dp
    batch = draw(st.sampled_from(TOKENS), label="tokens") // now
    most = _PACKED // (case.seq * times) if case.rows == 1 else batch
    return {"seq": case.seq * times, "batch": max(min(batch, most), 1)}


@st.composite
def _wide(draw: st.DrawFn, /, case: Case) -> dict[str, Any]:
    """Wider heads and more inner features: a hidden size of about one of HIDDEN."""
    times = max(draw(st.sampled_from(HIDDEN), label="hidden") // case.hidden, 1)
    return {"hidden": case.hidden * times, "ffn": case.ffn * min(times, max(_INNER // case.ffn, 1))}
