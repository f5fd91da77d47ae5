"""Checks that compare merged tensors with the truth, one kind of name each. Errors are ratios (see `tolerance`)."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace

from shardproof.harness.checking.finding import Finding
from shardproof.harness.checking.measures.kinds import KIND_WORDS, NUMERIC_KINDS, kind_of, never_made
from shardproof.harness.checking.measures.many_tensors import BLOCK, measured_together, whole_of
from shardproof.harness.checking.measures.measured import Measured
from shardproof.harness.checking.measuring import compare_with_truth, movement_of, sizes_of
from shardproof.harness.checking.records import Claims, RecordedRun, Truth
from shardproof.harness.verdicts.facts import Counts, Fact, Note, NoteKind, Worst, noted_names, notes_about, state_fact
from shardproof.harness.verdicts.verdict import FAIL, PASS, UNKNOWN

_EQUAL = 1e-6
"""Ratios that differ by less than this share count as equal."""
_UNJUDGED = (*(NoteKind.NOT_RETURNED, NoteKind.UNDECIDED, NoteKind.FLAWED), *(NoteKind.NOT_IN_TRUTH, NoteKind.DEVIATES))
"""Kinds of notes on tensors that are not measured."""
_KIND_NAMES = frozenset(KIND_WORDS.get(kind, kind) for kinds in NUMERIC_KINDS.values() for kind in kinds)
_REST = "forward"
"""The check of all other kinds of names, which the dense model of a subject may return as well."""
_KINDS = frozenset(kind for kinds in NUMERIC_KINDS.values() for kind in kinds)


def make_numeric_check(check: str) -> Callable[[RecordedRun, Truth, Claims], Finding | None]:
    """The check of this name: it compares the tensors of its kinds. Its finding is None if none were returned."""
    kinds = NUMERIC_KINDS[check]

    def belongs(name: str) -> bool:
        kind = kind_of(name)
        return kind in kinds or (check == _REST and kind not in _KINDS)

    def compare(run: RecordedRun, truth: Truth, claims: Claims) -> Finding | None:
        returned = {name for name in run.returned if belongs(name)}
        return _compare_kinds(run, truth, claims, returned, belongs) if returned else None

    return compare


def _compare_kinds(
    run: RecordedRun, truth: Truth, claims: Claims, returned: Set[str], belongs: Callable[[str], bool]
) -> Finding | None:
    expected = [name for name in truth.tensors if belongs(name)]
    if not expected and not any(returned & outcome.keys() for outcome in run.outcomes):
        return None  # captured gradients of a step that a loss scale skips, where the truth has none
    known = [name for name in expected if name in run.tensors]
    absent = [name for name in expected if name not in run.tensors]
    checks = {flaw.name: "replicas" if flaw.kind == "replica conflict" else "merge" for flaw in run.merged.flaws}
    flawed = {name: checks[name] for name in absent if name in checks}  # that check found these wrong
    notes = notes_about(
        not_returned=tuple(name for name in absent if name not in returned),
        undecided=tuple(name for name in absent if name in returned and name not in flawed),
        flawed=tuple(name for name in absent if name in flawed),
        not_in_truth=tuple(sorted(returned - set(expected))),
    )
    results = _measure_tensors(run, truth, known, expected)
    if claims.known_differences:
        results, by_design = claims.known_differences.apart(results)
        notes += by_design
    kinds = {kind_of(name) for name in returned}
    decided = Counter(kind_of(name) for name in (*(m.name for m in results if _is_decisive(m)), *flawed))
    unjudged = noted_names(notes, *_UNJUDGED)
    of = Counter(kind_of(name) for name in (*(m.name for m in results), *unjudged))
    counts = {kind: (decided[kind], count) for kind, count in of.items() if kind in kinds}
    return replace(_with_each_kind(_judge_measures(results, notes, flawed), counts, results, flawed), decided=counts)


def _measure_tensors(run: RecordedRun, truth: Truth, names: Sequence[str], expected: Sequence[str]) -> list[Measured]:
    """These merged tensors compared with the truth; all `expected` names give the rms of each kind.

    In float64, tensors without a control run, relu flip, Adam's bound or lower precision are compared all at once.
    """
    sizes = sizes_of(run, truth, expected)
    together: Mapping[str, Measured] = {}
    if run.dtype == "float64":
        known = {*truth.controls.adam_bound, *run.lower.names}.union(*truth.controls.runs, *truth.controls.relu_flips)
        values = {name: run.tensors[name] for name in names if name not in known}
        moves = {
            n: move for n in values if values[n].numel() <= BLOCK and (move := movement_of(run, truth, n)) is not None
        }
        values |= {name: whole_of(move.value) for name, move in moves.items() if move.value is not None}
        true = {**truth.tensors, **{name: whole_of(move.truth) for name, move in moves.items()}}
        together = measured_together(values, true, sizes)
        together = {name: one for name, one in together.items() if one.right or name not in moves}  # no slack here
    if all(name in together for name in names):
        return [together[name] for name in names]
    return [together.get(name) or compare_with_truth(run, truth, name, sizes.get(kind_of(name), 0.0)) for name in names]


_counts = make_numeric_check("tokens")


def check_tokens(run: RecordedRun, truth: Truth, claims: Claims) -> Finding | None:
    """Whether every step counts exactly as many tokens as the dense model. Its mean loss is divided by this number."""
    finding = _counts(run, truth, claims)
    if finding is None or finding.verdict != FAIL or finding.worst is None:
        return finding
    name = finding.worst.name
    counted, must = (int(tensors[name]) for tensors in (run.tensors, truth.tensors))
    return replace(finding, facts=(state_fact("miscounted", name=name, counted=counted, truth=must),))


_states = make_numeric_check("update")


def check_update(run: RecordedRun, truth: Truth, claims: Claims) -> Finding | None:
    """Whether parameters and states after a step are the dense model's. If the model skips the step, none may be new.

    The values of new states are not compared: that an optimizer made them at all is the error.
    """
    finding = _states(run, truth, claims)
    made = sorted(never_made(truth.tensors, {name for outcome in run.outcomes for name in outcome}))
    if finding is None or not made:
        return finding
    facts = (*(finding.facts if finding.verdict == FAIL else ()), state_fact("made_by_step", name=made[0]))
    names = (*finding.names, *made)
    decided = dict(finding.decided)
    for kind, count in Counter(map(kind_of, made)).items():
        found, of = decided.get(kind, (0, count))
        decided[kind] = (found + count, of)
    kept = (replace(note, names=tuple(name for name in note.names if name not in made)) for note in finding.notes)
    notes = tuple(note for note in kept if note.names or note.reason)
    return replace(finding, verdict=FAIL, facts=facts, names=names, notes=notes, decided=decided)


def _is_decisive(measured: Measured) -> bool:
    """Whether a comparison decides: the error is beyond its limit, or the limit does not admit half of the tensor."""
    return measured.wrong or (measured.right and (measured.decidable or measured.zero))


def _with_each_kind(
    finding: Finding, counts: Mapping[str, Counts], measured: Sequence[Measured], flawed: Mapping[str, str]
) -> Finding:
    """The finding; unknown instead of passed if no tensor of a returned kind is decided."""
    totals: Counter[str] = Counter()
    for kind, (decided, _) in counts.items():
        totals[name_of_kind(kind)] += decided
    empty = [kind for kind, decided in totals.items() if not decided and kind in _KIND_NAMES]
    if finding.verdict != PASS or not empty:
        return finding
    names = [name for name in noted_names(finding.notes) if name_of_kind(kind_of(name)) == empty[0]]
    lost = any(m.right and name_of_kind(kind_of(m.name)) == empty[0] for m in measured)
    deviates = any(name_of_kind(kind_of(name)) == empty[0] for name in noted_names(finding.notes, NoteKind.DEVIATES))
    checks = {check for name, check in flawed.items() if name_of_kind(kind_of(name)) == empty[0]}
    fact = _state_undecided(lost=lost, deviates=deviates, checks=checks, kind=empty[0], first=names[0])
    return replace(finding, verdict=UNKNOWN, facts=(fact,))


def _state_undecided(*, lost: bool, deviates: bool, checks: Iterable[str], **named: str) -> Fact:
    """Why no tensor of a kind is decided. `lost`: rounding could explain all of some tensor. `checks` are those that
    found some wrong.
    """
    if not lost and not deviates and (flawed := sorted({*checks})):
        return state_fact("none_compared", why="flawed", flawed=flawed, **named)
    return state_fact("none_compared", why="rounding" if lost else "stated" if deviates else "strange", **named)


def _judge_measures(measured: Sequence[Measured], notes: tuple[Note, ...], flawed: Mapping[str, str]) -> Finding:
    wrong = tuple(m for m in measured if m.wrong)
    overflowing = [m.name for m in measured if m.overflows]
    lost = [m.name for m in measured if m.right and not _is_decisive(m)] + overflowing
    proved = [m for m in measured if m.right and _is_decisive(m)]
    loose = [Note(kind=NoteKind.LOOSE, names=(m.name,), numbers=(m.loose, m.elements)) for m in proved if m.loose]
    unseen = (*notes, *notes_about(undecided=tuple(lost)), *loose)
    if wrong:
        first = worst_of(wrong)
        return Finding(
            verdict=FAIL,
            facts=(state_fact("differs", name=first.name),),
            worst=as_worst(first),
            notes=unseen,
            wrong=wrong,
            names=tuple(m.name for m in wrong),
        )
    if overflowing:
        return Finding(verdict=UNKNOWN, facts=(state_fact("overflows", name=overflowing[0]),), notes=unseen)
    if not proved:
        deviates = bool(noted_names(notes, NoteKind.DEVIATES))
        fact = _state_undecided(lost=bool(lost), deviates=deviates, checks=flawed.values())
        return Finding(verdict=UNKNOWN, facts=(fact,), notes=unseen)
    closest = worst_of(proved)
    agree = state_fact("agree", count=len(proved), closest=closest.name)
    return Finding(verdict=PASS, facts=(agree,), worst=as_worst(closest), notes=unseen)


def name_of_kind(kind: str) -> str:
    """A kind of name in words: "gradients" of "grad", "loss" of "loss"."""
    return KIND_WORDS.get(kind, kind)


def as_worst(measured: Measured) -> Worst:
    """The figures of a tensor for a finding."""
    return Worst(name=measured.name, error=measured.error, allowed=measured.allowed, epsilons=measured.epsilons)


def worst_of(measured: Sequence[Measured]) -> Measured:
    """The tensor furthest beyond its limit, or closest to it; the first of those that are equal but for rounding."""
    largest = max(each.ratio for each in measured)
    return next(each for each in measured if each.ratio >= largest * (1 - _EQUAL))
