"""Candidates of `shardproof predict`: the cases that a text stands for, and the bytes of each mode.

A text without a mode (or with mode=all) stands for every mode that the subject claims. With a world size it stands for
the meshes of that many ranks too. A case that cannot be is kept with the rule that it breaks. Unless the text has other
words, parameters are bfloat16 and AdamW trains in mixed precision. A case with experts without words on their load
stands for LOADS, since a router's choice is not known without numbers. Sizes are bytes of a rank.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pandas as pd

from shardproof.harness.errors import RequestError
from shardproof.harness.ledger import PASSES, wire_bytes
from shardproof.harness.mesh_axes import SAME_SAMPLES
from shardproof.harness.plain_case import PlainCase
from shardproof.harness.predicting.figures import States, mixed_adamw
from shardproof.harness.protocols import CaseLike, Subject
from shardproof.harness.subject import (
    case_of,
    claimed_modes,
    named_axes,
    refusal,
    resolve_subject,
    state_terms,
    vocabulary,
)
from shardproof.harness.terms import EventKey, closed_forms

BATCHES = (1, 4, 16, 64)
"""Sequences of a micro-batch at which the bytes of a mode are counted: bytes are a straight line in the tokens."""
DTYPE = "dtype=bfloat16"
"""Dtype of a text without `dtype=`."""
LOADS = ("routing=equal", "routing=equal skew=0.25", "routing=equal skew=1.0")
"""How experts are loaded where a text does not say it: alike, with a quarter of the tokens or all on a few."""
_LOAD = ("routing", "skew")
_MOST_CHOICES = 10**9
"""Tokens of a step times experts times layers, where choices are no arithmetic: about a minute."""
_NODE = 8
"""The most ranks of the axis tp in a search."""
_WIDEST_SHARDS = (_NODE, 8 * _NODE)
"""Weight-parallel sizes that a search tries beside wp=tp: a node, and eight of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A case to predict, or the reason why it cannot be; `words` are those in which the candidates of a text differ.

    `states`: what AdamW keeps of a parameter; None when the text says `optimizer=`, which is then the program's own.
    `load`: the words that say how experts are loaded.
    """

    text: str
    words: str
    case: CaseLike | None
    reason: str = ""
    states: States | None = None
    load: str = ""


def parse_candidates(text: str, subject: Subject, *, world: int | None = None) -> list[Candidate]:
    """The cases that a text stands for.

    Raises RequestError when the text names one case and that cannot be, and when none of several can. A world that the
    case's stages and context ranks do not divide raises it too.
    """
    given = resolve_subject(subject)
    if vocabulary(given) is not None:
        return [make_candidate(text, text, subject)]
    words = text.split()
    kept = [word for word in words if word != "mode=all"]
    modes_stated = [word for word in kept if word.startswith("mode=")]
    modes = modes_stated[-1:] or [f"mode={mode}" for mode in claimed_modes(resolve_subject(subject)) or ()]
    if not modes:
        raise RequestError(f"case {text!r}: names no mode, and the subject claims none; legal: mode=tp")
    if world is not None and world < 1:
        raise RequestError(f"world={world}: must be at least 1; legal: --world 8")
    rest = [word for word in kept if not word.startswith("mode=")]
    rest += [] if "dtype" in stated_words(text) else [DTYPE]
    if world is not None:
        rest = [word for word in rest if word.partition("=")[0] not in ("tp", "dp", "wp")]
        world = _ranks_left(world, rest)
    made = []
    loads = LOADS if len(modes) == 1 and world is None else LOADS[:1]
    for mode in modes:
        for mesh in [""] if world is None else _list_meshes(world, sharded=mode == "mode=isp"):
            for load in loads if _chooses_experts(" ".join([*rest, mode]), subject) else [""]:
                own = f"{mode} {mesh} {load}".replace("  ", " ").strip()
                made.append(make_candidate(" ".join([*rest, own]), own, subject))
    if not any(one.case for one in made):
        raise RequestError(f"case {text!r}: {made[0].reason}")
    return made


def _chooses_experts(text: str, subject: Subject) -> bool:
    """Whether a router chooses experts in the case of this text, which says nothing of their loads."""
    own_words = stated_words(text)
    if "routing" in own_words:
        return False
    model = " ".join(f"{key}={own_words[key]}" for key in ("preset", "experts") if key in own_words)
    try:
        return getattr(case_of(f"{model} mode=tp tp=1", resolve_subject(subject)), "experts", 0) > 0
    except RequestError:
        return own_words.get("experts", "0") != "0"


def _ranks_left(world: int, words: Iterable[str]) -> int:
    """Ranks of a world that are left to tp and dp by the stages and context ranks of these words, the last of each.

    Raises RequestError when the world is no multiple of them.
    """
    sizes = {key: int(value) for key, value in stated_words(" ".join(words)).items() if value.isdecimal()}
    for axis in reversed(SAME_SAMPLES):
        if sizes.get(axis, 1) > 1:
            if world % sizes[axis]:
                rule = f"must be a multiple of {axis}={sizes[axis]}"
                raise RequestError(f"world={world}: {rule}; legal: --world {-(-world // sizes[axis]) * sizes[axis]}")
            world //= sizes[axis]
    return world


def _list_meshes(world: int, *, sharded: bool) -> Iterator[str]:
    for tp in range(1, min(world, _NODE) + 1):
        if world % tp == 0:
            sizes = dict.fromkeys((tp, *_WIDEST_SHARDS)) if sharded else [0]
            for wp in sizes:
                if not wp or world % wp == 0:
                    yield f"tp={tp} dp={world // tp}" + (f" wp={wp}" if wp else "")


def stated_words(text: str) -> dict[str, str]:
    """Key -> value of every word of a text, the last where one is there twice."""
    return {key: value for key, _, value in (word.partition("=") for word in text.split())}


def make_candidate(text: str, words: str, subject: Subject) -> Candidate:
    """The case of this text, or the rule that it breaks."""
    load = " ".join(word for word in text.split() if word.partition("=")[0] in _LOAD)
    try:
        case = case_of(text, resolve_subject(subject))
    except RequestError as problem:
        return Candidate(text=text, words=words, case=None, reason=str(problem.__cause__), load=load)
    reason = refusal(case, resolve_subject(subject)) or _why_countless(case)
    plain = isinstance(case, PlainCase)
    states = None if plain or "optimizer" in stated_words(text) else mixed_adamw(case.dtype)
    return Candidate(text=text, words=words, case=None if reason else case, reason=reason, states=states, load=load)


def _why_countless(case: CaseLike) -> str:
    """Why the rows of its experts cannot be counted in reasonable time, "" where they can."""
    routing, sizes = getattr(case, "routing", ""), ("experts", "layers", "micro", "dp", "tokens")
    choices = math.prod(int(getattr(case, size, 1)) for size in sizes)
    if routing not in ("skewed", "empty") or choices <= _MOST_CHOICES:
        return ""
    rule = f"its rows are counted token by token, and {choices:.1g} choices are too many"
    return f"routing={routing}: {rule}; legal: {LOADS[1]}"


def growth_of_cases(cases: Iterable[CaseLike], subject: Subject, counted: str = "layers") -> pd.DataFrame:
    """mode, tokens, wire_bytes of a rank in a micro-batch, by closed form, for `growth.find_crossings`.

    counted="layers" leaves out all-to-alls and everything outside the layers; "all" leaves out nothing but what happens
    once a step. Empty when the subject states no closed form of all fields. Raises ValueError for another word.
    """
    if counted not in ("layers", "all"):
        raise ValueError(f"counted={counted}: must say which bytes count; legal: layers, all")
    rows = []
    for case in cases:
        for batch in BATCHES:
            one = _of_a_step(case, batch)
            terms = state_terms(one, subject)
            form = None if terms is None else closed_forms(terms, (0,), named_axes(one, subject))[0]
            if form is None or form.partial:
                continue
            sent = sum(
                calls * wire_bytes(line.op, line.payload_bytes, line.group_size)
                for line, calls in form.complete.items()
                if _counts(line, counted)
            )
            rows.append((case.mode, int(getattr(one, "tokens", batch)), float(sent) / one.micro))
    return pd.DataFrame(rows, columns=["mode", "tokens", "wire_bytes"])


def _of_a_step(case: CaseLike, batch: int) -> CaseLike:
    """A step of this batch, with one micro-batch unless the schedule of its pipeline needs more of them."""
    try:
        return case.but(batch=batch, steps=1, micro=1)
    except ValueError:
        return case.but(batch=batch, steps=1)


def _counts(line: EventKey, counted: str) -> bool:
    if counted == "all":
        return line.phase not in ("grad_sync", "step")
    return line.phase in PASSES and line.region.startswith("layers.") and line.op != "all_to_all"
