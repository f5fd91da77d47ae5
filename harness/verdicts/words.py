"""Sentences of verdicts, for terminal, page, markdown and pytest; those of single facts are in `sentences`.

A failure is six labelled lines: what, where, error, first (the first place), causes, repeat; and `when` after
experiments. No sentence is parsed: every reader takes the records (`verdicts.facts`).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from shardproof.harness.verdicts.facts import (
    AgreementByKind,
    Counts,
    Fact,
    FailedCheck,
    First,
    Note,
    NoteKind,
    When,
    WhenKind,
    Where,
    Worst,
    WrongTensor,
)

NO_CAUSE = "none of the known patterns fits"
_EXACT = "compared exactly: nothing is allowed to differ"
_NOTHING = "nothing to measure: this must never be"
_LISTED = 12
"""The most words in a list."""
_FLAWED = "not judged here, since check merge or replicas found it wrong"
_AMOUNTS = 3
"""The most shares of split parameters that a note lists."""
_WHEN = {
    WhenKind.UNDECIDED: "no other case shows it: each cannot be run or decided, fails for another reason, or changes "
    "further words",
    WhenKind.REFUTED: "nothing that is so again: the plainest case did not fail in this way when it was run once more",
    WhenKind.NOT_RUN_AGAIN: "not known: no time was left to run what was found again; a larger --when searches longer",
    WhenKind.NOT_SEARCHED: "not searched: no time was left before a case was tried; a larger --when searches longer",
    WhenKind.OTHER_FAULT: "not searched: it was searched for another failure of this case, which has another cause",
    WhenKind.ONLY_IN_THREADS: "only in threads: on processes (--engine pool) the case passes; see subject.per_rank",
}


def join_facts(facts: Sequence[Fact]) -> str:
    """What a check states, in one line."""
    return "; ".join(fact.text for fact in facts)


def render(check: str, statement: str, worst: Worst | None, failure: FailedCheck | None) -> list[str]:
    """The lines of a verdict: those of a failure, else the one sentence of its check."""
    if failure is None:
        return [statement]
    if failure.problem:
        return [f"{statement} (its diagnosis failed: {failure.problem})"]
    return label_lines(lines_of(check, statement, worst, failure))


def label_lines(lines: Mapping[str, str]) -> list[str]:
    """Lines after their labels, each as a single line."""
    return [f"{label + ':':8}{' '.join(text.split())}" for label, text in lines.items()]


def notes_text(notes: Sequence[Note]) -> str:
    """What a check left open, for a cell of a table: the first note, and how many more there are."""
    more = f" and {len(notes) - 1} more" if len(notes) > 1 else ""
    return note_text(notes[0]) + more if notes else ""


def note_text(note: Note) -> str:
    """A note of one check on one case: its first names, or its reason."""
    if note.kind == NoteKind.LOOSE:
        loose, elements = note.numbers
        return f"{note.names[0]}: {loose} of {elements} elements, whose step is within rounding"
    names = _list_words(note.names, _AMOUNTS)
    numbers = ", ".join(f"{number} %" for number in note.numbers)
    kind = _FLAWED if note.kind == NoteKind.FLAWED else note.kind.value
    return f"{kind}: {' '.join(filter(None, (names, note.reason, numbers)))}"


def lines_of(check: str, statement: str, worst: Worst | None, failure: FailedCheck) -> dict[str, str]:
    """The lines of a failure by their labels."""
    if failure.end is not None:
        who = "the machine failed" if failure.end.machine else "the subject did not finish"
        statement = f"{who}: {failure.end.lines[0]}"
    lines = {
        "what": f"{statement} (check {check})",
        "where": where(failure.where),
        "error": _error(check, worst, failure),
        "first": _first_line(failure, statement) or statement,
        "causes": "; ".join(cause.fact.text for cause in failure.causes) or _agreement(failure.agreement),
    }
    if failure.when is not None:
        lines["when"] = when_line(failure.when)
    return {**lines, "repeat": failure.repeat}


def where(place: Where) -> str:
    """Mode, ranks, step, phase, module and tensor, as far as they are known."""
    parts = [f"mode={place.mode}", _ranks(place)]
    if place.step >= 0:
        parts.append(f"step {place.step}")
    if place.phase:
        parts.append(f"phase {place.phase}")
    if place.region:
        parts.append(f"module {place.region}")
    if place.tensor:
        parts.append(f"tensor {place.tensor}")
    return ", ".join(parts)


def _ranks(place: Where) -> str:
    world_size, ranks = place.world_size, place.ranks
    if not ranks or len(ranks) == world_size:
        return f"all {world_size} ranks" if world_size > 1 else "the only rank"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of {world_size}"


def _error(check: str, worst: Worst | None, failure: FailedCheck) -> str:
    """The error, and what is allowed."""
    if failure.end is not None:
        nothing = "nothing to compare: there is no outcome"
        file = failure.end.traceback
        return f"{nothing}; the whole traceback is in {file} of the run folder" if file else nothing
    if failure.events is not None:
        differing, events = failure.events
        if not events:
            return _NOTHING
        return f"{differing} of {events} events differ between witnesses, allowed 0" if differing else _EXACT
    if worst is None:
        return _NOTHING if check in ("coverage", "parallelism", "waits") else _EXACT
    if check == "truth":
        return f"relative error {worst.error:.3g}, and rounding to float32 explains {worst.allowed:.3g}"
    if not failure.wrong and check in ("replicas", "determinism", "recording"):
        share = f"{100 * worst.error:.3g} % of the largest value"
        return f"{_EXACT}; they differ by {share if math.isfinite(worst.error) else 'what is no number, or in form'}"
    if not failure.wrong:
        return f"{worst.error:g} event{'s' if worst.error > 1 else ''} more or less than expected on a rank, allowed 0"
    one = next((wrong for wrong in failure.wrong if wrong.name == worst.name), failure.wrong[0])
    return (
        f"{_amount(one, failure.unit)}; {len(failure.wrong)} tensor{'s' * (len(failure.wrong) > 1)} of this check wrong"
    )


def _amount(wrong: WrongTensor, unit: float) -> str:
    if wrong.measure == "exact":
        return _EXACT
    if wrong.measure == "absolute":
        return f"the truth is 0 throughout: allowed {wrong.allowed:.3g}, found {wrong.error:.3g}"
    in_eps = [f" ({ratio / unit:.3g} eps)" if unit else "" for ratio in (wrong.error, wrong.allowed)]
    return f"{wrong.measure} error {wrong.error:.3g}{in_eps[0]}, allowed {wrong.allowed:.3g}{in_eps[1]}"


def _first_line(failure: FailedCheck, statement: str) -> str:
    """The place and what shows it: "backward of head in step 0: act_grad/final_norm; in the ledger: ..."."""
    end, first = failure.end, failure.first
    if end is not None:
        return " | ".join([*([end.frames] if end.frames else []), *end.lines[1:]]) or end.lines[0]
    shown = [first.name, *first.beside] if first.name else []
    if first.note:
        shown.append(f"{first.note} (found by comparing modules; the subject states no layout)")
    if first.event:
        shown.append(f"in the ledger: {first.event}")
    shown = shown or [statement] * bool(first.phase)
    return (f"{first_place(first)}: " if first.phase else "") + "; ".join(shown)


def first_place(first: First) -> str:
    """Phase, module and step: "backward of head in step 0"."""
    step = f" in step {first.step}" if first.step >= 0 else ""
    phase = "optimizer update" if first.phase == "step" else first.phase or "unknown phase"
    return f"{phase}{f' of {first.region}' if first.region else ''}{step}"


def _agreement(known: AgreementByKind) -> str:
    """For a failure without a cause: which tensors agree with the truth and which do not, by kind, if they were
    counted.
    """
    right, wrong = (
        ", ".join(f"{kind} {count} of {of}" for kind, (count, of) in counts.items())
        for counts in (known.right, known.wrong)
    )
    if not wrong:
        return NO_CAUSE
    right = f"{right} agree with the truth" if right else "no tensor agrees with the truth"
    return f"none is known; {right}; {wrong} do not"


def when_line(when: When) -> str:
    """The words of its case that a failure needs: a list of statements, each of which is one run.

    "fails with tp=2|4 and zero=1, perhaps act=relu; passes with tp=1, with zero=0 (tried on 'tp=2 zero=1 act=relu')".
    """
    untried = f"no time was left to try {_list_words(when.untried)}" if when.untried else ""
    if when.kind in _WHEN:
        return _WHEN[when.kind]
    perhaps, on = _list_words(when.perhaps), f"{when.case!r}"
    if when.kind == WhenKind.NONE_NEEDED:
        ranks = ", on one rank" if when.ranks == 1 else ""
        needed = f"; perhaps needed: {perhaps}" if perhaps else ""
        return f"fails even in the simplest case tried: {on}{ranks}{needed}{f' ({untried})' if untried else ''}"
    beside = f", perhaps {perhaps}" if perhaps else ""
    right = ", ".join(
        f"with {one.words}" + (f" but for {'|'.join(one.but_for)}" if one.but_for else "") for one in when.right
    )
    tried = "; ".join(filter(None, (on, untried)))
    return f"fails with {' and '.join(when.fails)}{beside}; passes {right} (tried on {tried})"


def follows(shown: str, counts: Mapping[str, int], cases: int) -> str:
    """Checks that fail with the same first place as the `shown` one, with the number of their cases; "" without any.
    Of the shown check itself these are further cases.
    """
    others = {check: count for check, count in counts.items() if check != shown}
    alike = {*others.values()} == {cases}
    checks = [check if alike else f"{check} ({_cases(count)})" for check, count in others.items()]
    listed = [", ".join(checks) + (f" ({_cases(cases)})" if alike else "")] if others else []
    more = [f"{shown} ({_cases(counts[shown]).replace(' ', ' more ')})"] if shown in counts else []
    return f"also failing at this place: {', '.join(listed + more)}" if counts else ""


def place(statement: str, failure: FailedCheck | None) -> str:
    """The first place in words, else what the check states."""
    return first_place(failure.first) if failure and failure.first.phase else statement


def describe_decided(kinds: Mapping[str, Counts]) -> str:
    """How many tensors were decided: of all, or of each kind that is not fully decided; "" if none was counted."""
    known, tensors = (sum(counts[place] for counts in kinds.values()) for place in (0, 1))
    if not kinds:
        return ""
    if known == tensors:
        return f"all {tensors:,} tensors decided"
    partly = {kind: counts for kind, counts in kinds.items() if counts[0] < counts[1]}
    shares = [f"{kind} {own:,} of {of:,}" for kind, (own, of) in partly.items()]
    others = ["all others"] if len(partly) < len(kinds) else []
    return f"{known:,} of {tensors:,} tensors decided: {', '.join(shares + others)}"


def describe_undecided(kind: str, patterns: Mapping[str, int], tensors: int, cases: int) -> str:
    """A note on returned tensors that stay undecided, by the patterns of their names."""
    listed = [name if count == 1 else f"{name} ({count})" for name, count in list(patterns.items())[:_LISTED]]
    more = f" and {len(patterns) - _LISTED} more patterns of names" if len(patterns) > _LISTED else ""
    tally = f"{sum(patterns.values()):,} of {tensors:,} {kind} in {_cases(cases)}"
    return f"could not be judged: {tally}: rounding alone is as large, or they do not merge: {', '.join(listed)}{more}"


def split_shares(shares: Mapping[int, int]) -> str:
    """A note on the percentage of parameters that are split, with the number of cases."""
    least, most = min(shares), max(shares)
    share = f"{least} %" if least == most else f"from {least} to {most} %"
    return f"{share} of parameter elements are sharded ({_cases(sum(shares.values()))})"


def describe_unreturned(statement: str, silent: Sequence[str], on_purpose: Sequence[str]) -> str:
    """A note on tensors of the truth that were not returned, by kind."""
    parts = [statement]
    parts += [f"not returned, so not checked: {_count_names(silent)}"] if silent else []
    parts += [f"left out on purpose, so not checked: {_count_names(on_purpose)}"] if on_purpose else []
    return "; ".join(parts)


def left_out_fields(fields: Sequence[str], cases: int) -> str:
    """A note on what a closed form leaves open."""
    return f"not checked: {', '.join(fields)} of the calls: the closed form leaves them out ({_cases(cases)})"


def not_checked(reason: str, cases: int) -> str:
    """A note on what a check did not look at."""
    return f"not checked: {reason} ({_cases(cases)})"


def deviation(kind: NoteKind, sentence: str, names: Sequence[str], cases: int) -> str:
    """A note on a deviation that a subject states."""
    if kind == NoteKind.DEVIATES:
        return f"stated deviation, not checked: {sentence} ({_count_names(names)}; {_cases(cases)})"
    return f"{kind.value}: {sentence} ({_list_words(names, _AMOUNTS)}) in {_cases(cases)}"


def dtype_dependent(reason: str, cases: int) -> str:
    """A note on a dense model whose function depends on the dtype."""
    rule = "the dense model in float64, for its function depends on the dtype"
    return f"not checked: {rule}: {reason} ({_cases(cases)}); legal: state that number, or prove float64"


def lower_precision(dtype: str, reason: str, cases: int) -> str:
    """A note on cases that were judged by the limits of a lower precision."""
    return f"not checked: errors below those of {dtype} ({reason}) in {_cases(cases)}"


def doubt(reason: str, cases: int) -> str:
    """A note on what the recorder was uncertain of."""
    return f"not certain: {reason} ({_cases(cases)})"


def describe_grouping(words: str, problem: str) -> str:
    """A grouping of a batch that did not finish."""
    return f"{words} ({problem})"


def unfinished_groupings(groupings: str, cases: int) -> str:
    """A note on groupings that the subject does not finish."""
    return f"regrouping: the subject does not finish {groupings} in {_cases(cases)}; subject.refuses can state why"


def unread_rows(rows: str, cases: int, others: int) -> str:
    """A note on rows of tables that no token looks up."""
    more = f"; other rows in {_cases(others)}" if others else ""
    return f"unused vocabulary rows have no gradient to check: {rows} in {_cases(cases)}{more}"


def _count_names(names: Sequence[str]) -> str:
    kinds = Counter(name.partition("/")[0] for name in names)
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items())


PARTS: Mapping[str, str] = {
    "recorded": "the ranks, with the recorder",
    "plain": "the ranks without a recorder, to compare both runs",
    "again": "the ranks once more: to see whether two runs differ, or with a lower precision moved by its rounding",
    "truth": "the dense model",
    "control": "the dense model with rounding moved, to see how far it takes a right result",
    "regrouped": "the same batch over other ranks and micro-batches",
    "documents": "one step with some documents changed, or with the gradients of some alone",
    "explained": "shares of the dense model's gradients, behind a failure",
    "located": "the ranks behind a failure: first wrong module, drawn numbers, samples and first values",
    "elsewhere": "other cases behind a failure: of another size, or ended a step earlier",
    "when": "cases with words changed, to find those that a failure needs",
    "checks": "no run: tensors merged and compared",
}
"""Parts of a case -> what was run, and why."""


def _cases(count: int) -> str:
    return f"{count} case{'s' if count > 1 else ''}"


def _list_words(words: Sequence[str], most: int = _LISTED) -> str:
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more
