"""Candidates of `shardproof predict`: the cases that a text stands for.

A text without a mode (or with mode=all) stands for every mode that the subject claims. A case that cannot be is kept
with the rule that it breaks. Unless the text has other words, parameters are bfloat16 and AdamW trains in mixed
precision. A case with experts without words on their load stands for LOADS, since a router's choice is not known
without numbers.
"""

import math
from dataclasses import dataclass

from shardproof.harness.errors import RequestError
from shardproof.harness.plain_case import PlainCase
from shardproof.harness.predicting.figures import States, mixed_adamw
from shardproof.harness.protocols import CaseLike, Subject
from shardproof.harness.subject import case_of, claimed_modes, refusal, resolve_subject, vocabulary

DTYPE = "dtype=bfloat16"
"""Dtype of a text without `dtype=`."""
LOADS = ("routing=equal", "routing=equal skew=0.25", "routing=equal skew=1.0")
"""How experts are loaded where a text does not say it: alike, with a quarter of the tokens or all on a few."""
_LOAD = ("routing", "skew")
_MOST_CHOICES = 10**9
"""Tokens of a step times experts times layers, where choices are no arithmetic: about a minute."""


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


def parse_candidates(text: str, subject: Subject) -> list[Candidate]:
    """The cases that a text stands for.

    Raises RequestError when the text names one case and that cannot be, and when none of several can.
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
    rest = [word for word in kept if not word.startswith("mode=")]
    rest += [] if "dtype" in stated_words(text) else [DTYPE]
    made = []
    loads = LOADS if len(modes) == 1 else LOADS[:1]
    for mode in modes:
        for load in loads if _chooses_experts(" ".join([*rest, mode]), subject) else [""]:
            own = f"{mode} {load}".strip()
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
