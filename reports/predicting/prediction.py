"""The computing half of `shardproof predict`: the cases that a text means, the forecast of each, and whether it fits.

A text without a mode (or with mode=all) means a case in every mode that the subject claims. A case that breaks a rule
is kept with that rule. Unless the text says otherwise, parameters are bfloat16 and AdamW trains in mixed precision. If
the text has experts and says nothing about their load, it means a case for each of LOADS, since a router's choice is
not known without numbers. Several texts make one prediction. Sizes are bytes of one rank and one step; nothing is
printed here.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from shardproof.harness.engines.threads.dry import DryEngine
from shardproof.harness.errors import NoNumbers, NotComputed, RequestError
from shardproof.harness.plain_case import PlainCase, WordError
from shardproof.harness.predicting.figures import Forecast, States, mixed_adamw
from shardproof.harness.predicting.forecast import forecast_case
from shardproof.harness.protocols import CaseLike, Subject
from shardproof.harness.subject import case_of, claimed_modes, refusal, resolve_subject, vocabulary
from shardproof.reports.predicting import loads
from shardproof.reports.printing.text_tables import figure

DTYPE = "dtype=bfloat16"
"""Added to a text without `dtype=`."""
LOADS = ("routing=equal", "routing=equal skew=0.25", "routing=equal skew=1.0")
"""Added to a text without `routing=`: equal loads, and a quarter of the tokens or all of them on a few experts."""
_LOAD = ("routing", "skew")
_MOST_CHOICES = 10**9
"""The most choices (tokens of a step times experts times layers) that are counted one by one: about a minute."""
_GIB = 2**30
_SIZES = ("seq", "batch", "micro")
_WHOLE = ("ranks", "tokens", "calls", "payload_bytes", "wire_bytes", *_SIZES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A case to predict, or the reason why it is not legal; the candidates of a text differ in their `words`.

    `states`: what AdamW keeps of a parameter; None when the text says `optimizer=`, and the program's own states count.
    `load`: the words that say how experts are loaded.
    """

    text: str
    words: str
    case: CaseLike | None
    reason: str = ""
    states: States | None = None
    load: str = ""


def parse_candidates(text: str, subject: Subject) -> list[Candidate]:
    """The cases that a text means. Raises RequestError if none of them is legal."""
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
    """Whether the case of this text has experts, and the text does not say how they are loaded."""
    own_words = stated_words(text)
    if "routing" in own_words:
        return False
    model = " ".join(f"{key}={own_words[key]}" for key in ("preset", "experts") if key in own_words)
    try:
        return getattr(case_of(f"{model} mode=tp tp=1", resolve_subject(subject)), "experts", 0) > 0
    except RequestError:
        return own_words.get("experts", "0") != "0"


def stated_words(text: str) -> dict[str, str]:
    """Key -> value of every word of a text; of two words with one key the last."""
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
    """Why the rows of the case's experts cannot be counted in reasonable time, "" if they can."""
    routing, sizes = getattr(case, "routing", ""), ("experts", "layers", "micro", "dp", "tokens")
    choices = math.prod(int(getattr(case, size, 1)) for size in sizes)
    if routing not in ("skewed", "empty") or choices <= _MOST_CHOICES:
        return ""
    rule = f"its rows are counted token by token, and {choices:.1g} choices are too many"
    return f"routing={routing}: {rule}; legal: {LOADS[1]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A prediction of one text: `answer` in words, and a row for each candidate, ordered by the memory that it needs.

    rows        columns as in `_row_of_candidate`; cases that are not legal come last
    memory_gib  the memory of a rank
    states      bytes kept of each parameter, if they follow a formula; "" if the program's own were measured
    stages      the pipeline stages of the first row that has any (`reports.predicting.loads`)
    loads       what stages need under each load of experts, if the case has loads (`reports.predicting.loads`)
    calls       the bytes that stages send under each load
    beside      what the subject states beside its closed form (`subject.beside(case)`), for a single case
    """

    text: str
    memory_gib: float
    rows: pd.DataFrame
    answer: str
    states: str
    beside: pd.DataFrame
    stages: pd.DataFrame
    loads: pd.DataFrame
    calls: pd.DataFrame


def predict_text(
    text: str,
    subject: Subject,
    memory_gib: float,
    engine: DryEngine,
    *,
    tick: Callable[[int, int, str, str], object] = lambda *_: None,
) -> Prediction:
    """The prediction of the cases that a text means, for ranks of this memory.

    Raises RequestError when the text is wrong or cannot be run dry.
    """
    found = parse_candidates(text, subject)
    made: list[tuple[Candidate, Forecast | None]] = []
    for number, candidate in enumerate(found):
        one = None
        if candidate.case is not None:
            one = _forecast_case(candidate, candidate.case, subject, engine, whole=len(found) == 1)
        made.append((candidate, one))
        tick(number + 1, len(found), candidate.text, "" if one else "illegal")
    made.sort(key=lambda pair: pair[1].memory.peak if pair[1] else math.inf)
    rows = _frame_of_rows([_row_of_candidate(candidate, one, memory_gib) for candidate, one in made])
    legal = [one for _, one in made if one is not None]
    staged = next((one for one in legal if one.stages), None)
    one_mode = len({one.case.mode for one in legal}) == 1
    by_load = {one.load: made for one, made in made if made is not None and one.load} if one_mode else {}
    return Prediction(
        text=text,
        memory_gib=memory_gib,
        rows=rows,
        answer=answer_in_words(rows, memory_gib),
        states=_words_of_states(made),
        beside=_join_measured(legal, subject),
        stages=pd.DataFrame() if staged is None else loads.rows_of_stages(staged),
        loads=loads.memory_by_load(by_load),
        calls=loads.calls_by_load(by_load),
    )


def _join_measured(legal: Sequence[Forecast], subject: Subject) -> pd.DataFrame:
    lines = getattr(resolve_subject(subject).call, "beside", None)
    found = lines(legal[0].case) if lines is not None and len(legal) == 1 else ()
    return pd.DataFrame(found, columns=["what", "how much"])


def _forecast_case(
    candidate: Candidate, case: CaseLike, subject: Subject, engine: DryEngine, *, whole: bool
) -> Forecast:
    try:
        return forecast_case(case, subject, engine, whole=whole, states=candidate.states)
    except (NoNumbers, NotComputed) as problem:
        raise RequestError(f"case {candidate.text!r}: cannot be run dry: {problem.cause}") from problem
    except WordError as problem:
        rule = "cannot be predicted, which runs fewer steps, micro-batches or layers of it"
        raise RequestError(f"case {candidate.text!r}: {rule}: {problem}") from problem


def _frame_of_rows(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """The rows as a table, in which integers stay integers: pandas would make them floats if one is missing."""
    return pd.DataFrame(rows).assign(**{name: pd.array([row[name] for row in rows], dtype="Int64") for name in _WHOLE})


def _row_of_candidate(candidate: Candidate, one: Forecast | None, memory_gib: float) -> dict[str, Any]:
    """The row of a candidate, with sizes in bytes; one that is not legal has no numbers."""
    memory, sent = (one.memory, one.traffic) if one else (None, None)
    fits = "" if memory is None else ("yes" if memory.peak <= memory_gib * _GIB else "no")
    sizes = {name: getattr(one.case, name, None) if one else None for name in _SIZES}
    return {
        "words": candidate.words,
        "case": candidate.text,
        "legal": "yes" if one else "no",
        "reason": candidate.reason,
        "mode": one.case.mode if one else candidate.words.split()[0].removeprefix("mode="),
        "ranks": one.case.world_size if one else None,
        "tokens": (one.tokens or None) if one else None,
        **{f"{name}_bytes": getattr(memory, name) if memory else None for name in loads.PARTS},
        **{name: getattr(sent, name) if sent else None for name in ("calls", "payload_bytes", "wire_bytes")},
        **{name: size if type(size) is int else None for name, size in sizes.items()},
        "fits": fits,
        "ledger": one.ledger if one else "",
    }


def answer_in_words(rows: pd.DataFrame, memory_gib: float) -> str:
    """Whether the cases fit into this memory, and what the smallest of them needs."""
    best, fitting, legal = rows.iloc[0], int((rows["fits"] == "yes").sum()), int((rows["legal"] == "yes").sum())
    need = best["peak_bytes"] / _GIB
    if len(rows) == 1:
        fits = "fits" if fitting else "does not fit"
        return f"{fits} in {memory_gib:g} GiB: {best['case']} needs {figure(need)} GiB of a rank"
    return f"{fitting} of {legal} fit in {memory_gib:g} GiB: {best['words']} needs least, {figure(need)} GiB of a rank"


def step_words(rows: pd.DataFrame) -> str:
    """The batch and the length of its sequences: "a step: seq=2048 batch=1 micro=8 on every data rank; "."""
    sizes_by_word = {name: sorted({int(size) for size in rows[name].dropna()}) for name in _SIZES}
    words = " ".join(f"{name}={'|'.join(map(str, sizes))}" for name, sizes in sizes_by_word.items() if sizes)
    tokens = sorted({int(count) for count in rows["tokens"].dropna()})
    whole = f", {'|'.join(f'{count:,}' for count in tokens)} tokens on all" if tokens else ""
    return f"a step: {words} on every data rank{whole}; " if words else ""


def _words_of_states(made: Iterable[tuple[Candidate, Forecast | None]]) -> str:
    """Bytes that training keeps of every parameter, in words."""
    for candidate, one in made:
        kept = candidate.states
        if one is not None and kept is not None:
            parts = (
                f"parameter {kept.parameter}, gradient {kept.gradient}, master {kept.master}, moments {kept.moments}"
            )
            return f"{one.case.dtype}, AdamW as in Megatron-LM: {kept.together} bytes a parameter ({parts})"
    return ""


def join_predictions(predictions: Sequence[Prediction]) -> Prediction:
    """The prediction of all these texts. Candidates are named by the words that not all of them have.

    The tables about a single text are left out: stages, loads, calls, `beside`.
    """
    texts = [str(case) for one in predictions for case in one.rows["case"]]
    shared = set.intersection(*(set(text.split()) for text in texts))
    short = {text: " ".join(word for word in text.split() if word not in shared) or text for text in texts}
    rows = pd.concat([one.rows.assign(words=[short[case] for case in one.rows["case"]]) for one in predictions])
    rows = rows.drop_duplicates("case").sort_values("peak_bytes", kind="stable", ignore_index=True)
    first = predictions[0]
    return replace(
        first,
        text=" ".join(word for word in texts[0].split() if word in shared) or f"{len(predictions)} cases",
        rows=rows,
        answer=answer_in_words(rows, first.memory_gib),
        states="; ".join(dict.fromkeys(one.states for one in predictions)),
        beside=first.beside.head(0),
        stages=pd.DataFrame(),
        loads=first.loads.head(0),
        calls=first.calls.head(0),
    )
