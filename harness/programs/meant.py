"""The calls in traces held against a closed form: which are missing, extra, of other bytes, dtype, group or phase.

A call is its op, group, dtype and payload; a field that is unknown for any call of an op is not compared for it. Phases
are compared where a trace has modules, without which forward is not told from loss, nor backward from recompute, and
where no annotation of the user says them. A trace names classes and a closed form paths, so of modules is compared how
many there are and how many calls each issues; a program may nest them otherwise, so that is a note. The closed form is
that of one step times the steps of the trace, or of the whole run where the trace has no steps.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from shardproof.harness.errors import RequestError, name_ranks, ranks_text
from shardproof.harness.protocols import Axes, CaseLike
from shardproof.harness.recording.naming import axis_name
from shardproof.harness.subject import named_axes, state_terms
from shardproof.harness.terms import ClosedForm, EventKey, Term, closed_forms, select_visible_terms
from shardproof.harness.traces.calls import Trace, TracedCall
from shardproof.harness.witnesses.chosen import terms_of


class CallKind(NamedTuple):
    """Calls that are one: what is compared. `axis` "", `dtype` "" and numbers -1 are not compared."""

    op: str
    axis: str
    group_size: int
    dtype: str
    payload_bytes: int

    @property
    def group(self) -> str:
        """ "tp (4 ranks)"."""
        size = f"{self.group_size} ranks" if self.group_size >= 0 else ""
        return f"{self.axis} ({size})" if self.axis and size else self.axis or f"a group of {size or 'unknown size'}"

    @property
    def size(self) -> str:
        """ "512 B float32"."""
        size = f"{self.payload_bytes:,} B" if self.payload_bytes >= 0 else ""
        return f"{size} {self.dtype}".strip()

    def __str__(self) -> str:
        return f"{self.op}{' of ' if self.size else ''}{self.size} over {self.group}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmeant:
    """By how many calls each of `ranks` parts from the closed form, and in what: `found` is None where they are
    missing, `meant` where they are extra. `phases` are that of the trace and those that are meant, where they are all
    that differs. `where` is a place in words.
    """

    found: CallKind | None
    meant: CallKind | None
    calls: int
    ranks: tuple[int, ...] = ()
    where: str = ""
    phases: tuple[str, str] = ("", "")

    def __str__(self) -> str:
        calls, on = f"{self.calls} call{'s' if self.calls > 1 else ''}", f"on {name_ranks(self.ranks)}"
        where = f"; {self.where}" if self.where else ""
        if self.found is None or self.meant is None:
            kind = "missing" if self.found is None else "extra"
            return f"{kind}: {calls}, {self.found or self.meant}, {on}{where}"
        if self.phases[0]:
            return (
                f"other phase: {calls}, {self.found} in {self.phases[0]}, where {self.phases[1]} is meant, {on}{where}"
            )
        if (self.found.axis, self.found.group_size) != (self.meant.axis, self.meant.group_size):
            return f"other group: {calls}, {self.found}, where {self.meant.group} is meant, {on}{where}"
        kind = "bytes" if self.found.dtype == self.meant.dtype else "dtype"
        return f"other {kind}: {calls}, {self.found}, where {self.meant.size} is meant, {on}{where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgainstForm:
    """What was compared: `calls` of the traces, `unmeant` where they part from the closed form, `notes` on the rest."""

    calls: int
    unmeant: tuple[Unmeant, ...]
    notes: tuple[str, ...]


def compare_with_form(traces: Sequence[Trace], case: CaseLike, subject: Any) -> AgainstForm:
    """Hold every call of these traces against the closed form of a case.

    Raises RequestError where the subject states none, the world has other ranks, or steps cannot be told apart.
    """
    axes, terms = named_axes(case, subject), state_terms(case, subject)
    if terms is None:
        raise RequestError(f"case {case}: its subject states no closed form; legal: a subject with `expected`")
    worlds = {trace.world_size for trace in traces} - {None}
    if worlds - {case.world_size} or any((trace.rank or 0) >= case.world_size for trace in traces):
        there = ranks_text(sorted(world or 0 for world in worlds)) or max(trace.rank or 0 for trace in traces) + 1
        rule = f"has {case.world_size} ranks, and the job of the traces {there}"
        raise RequestError(f"case {case}: {rule}; legal: the layout of the job")
    inside = {trace.rank or 0: [c for c in trace.calls if c.step is not None or not trace.steps] for trace in traces}
    outside = sum(len(trace.calls) for trace in traces) - sum(map(len, inside.values()))
    notes = [f"not compared: {outside} calls outside of the steps of the profiler"] if outside else []
    notes += [
        f"calls before the first one of rank {trace.rank} are lost, and told as missing: {trace.lost}"
        for trace in traces
        if trace.lost and not trace.steps
    ]
    compared, more = _find_compared_fields([call for calls in inside.values() for call in calls])
    found: dict[Unmeant, list[int]] = {}
    structures: dict[str, list[int]] = {}
    for trace in traces:
        rank = trace.rank or 0
        form = closed_forms(_terms_of_trace(trace, case, subject, terms), (rank,), axes)[rank]
        groups = _GroupNames(rank, case.world_size, axes, form)
        kinds = [_kind_of_call(call, groups, compared) for call in inside[rank]]
        meant = [(_kind_of_key(key, groups, compared), key, number) for key, number in form.complete.items()]
        partial = [replace(term, axis=groups.of_axis(term.axis)) if term.axis else term for term in form.partial]
        for one in _find_unmeant(kinds, inside[rank], meant, partial, compared):
            found.setdefault(one, []).append(rank)
        stated = _StatedPlaces(meant, partial, compared)
        if any(call.module is not None for call in inside[rank]):
            for one in stated.find_other_phases(kinds, inside[rank]):
                found.setdefault(one, []).append(rank)
            structures.setdefault(stated.describe_other_modules(kinds, inside[rank]), []).append(rank)
    more += _phase_notes([call for calls in inside.values() for call in calls])
    more += [f"{told} ({name_ranks(on)})" for told, on in structures.items() if told]
    joined = sorted((replace(one, ranks=tuple(ranks)) for one, ranks in found.items()), key=_order_of_unmeant)
    return AgainstForm(
        calls=sum(map(len, inside.values())), unmeant=tuple(joined), notes=(*notes, *more, _NEVER_COMPARED)
    )


_NEVER_COMPARED = "not compared: reduce op, which traces of torch do not hold"


def _phase_notes(calls: Sequence[TracedCall]) -> list[str]:
    lacking = sum(not _has_known_phase(call) for call in calls)
    if not any(call.module is not None for call in calls):
        return ["not compared: phase and module, of traces without modules (profile(with_stack=True) records them)"]
    return [f"not compared: phase, not known for {lacking} of {len(calls)} calls"] if lacking else []


def _has_known_phase(call: TracedCall) -> bool:
    """An annotation of the user may enclose more than the phase that it names."""
    return bool(call.phase) and not call.is_phase_annotated


_WORDS = {"axis": "group", "group_size": "size of the group", "dtype": "dtype", "payload_bytes": "bytes"}
"""Fields that are compared beside the op, in words."""
_Compared = Mapping[str, frozenset[str]]
"""The fields that are compared, by op; those of any op under ""."""

_MeantCalls = tuple[CallKind, EventKey, int]
"""A line of the closed form: what is compared of it, all of it, and how many calls it counts."""


class _StatedPlaces:
    """Phases and modules of calls, as a closed form states them; kinds that a term counts without them are left out."""

    def __init__(self, meant: Sequence[_MeantCalls], partial: Sequence[Term], compared: _Compared) -> None:
        self._meant: dict[CallKind, Counter[tuple[str, str]]] = {}
        for kind, key, number in meant:
            self._meant.setdefault(kind, Counter())[key.phase, key.region] += number
        for kind in list(self._meant):
            known = ("op", *sorted(compared[kind.op]))
            for term in partial:
                if all(getattr(term, name) in (None, getattr(kind, name)) for name in known):
                    self._meant.pop(kind, None)

    def find_other_phases(self, kinds: Sequence[CallKind], calls: Sequence[TracedCall]) -> Iterator[Unmeant]:
        """Calls in a phase in which fewer are meant. Calls of unknown phase may be of any, and extra ones are named."""
        seen: dict[CallKind, Counter[str]] = {}
        first: dict[tuple[CallKind, str], str] = {}
        for kind, call in zip(kinds, calls, strict=True):
            if _has_known_phase(call):
                seen.setdefault(kind, Counter())[call.phase] += 1
                first.setdefault((kind, call.phase), _seen_at(call))
        there = Counter(kinds)
        for kind, places in self._meant.items():
            meant = Counter[str]()
            for (phase, _), number in places.items():
                meant[phase] += number
            spare = max(0, there[kind] - meant.total())
            own = seen.get(kind, Counter())
            usual = " or ".join(sorted(meant - own))
            for phase, number in sorted((own - meant).items()):
                off, spare = max(0, number - spare), max(0, spare - number)
                if off and usual:
                    at = first[kind, phase]
                    yield Unmeant(found=kind, meant=kind, calls=off, where=at, phases=(phase, usual))

    def describe_other_modules(self, kinds: Sequence[CallKind], calls: Sequence[TracedCall]) -> str:
        """A sentence where a kind of call comes from other numbers of modules in a phase than is meant, else ""."""
        seen: dict[tuple[CallKind, str], Counter[str | None]] = {}
        for kind, call in zip(kinds, calls, strict=True):
            phase = call.phase if _has_known_phase(call) else ""
            seen.setdefault((kind, phase), Counter())[call.module] += 1
        for kind, places in self._meant.items():
            for phase in sorted({phase for phase, _ in places}):
                meant = sorted(number for (one, region), number in places.items() if one == phase and region)
                own = seen.get((kind, phase), Counter())
                there = sorted(number for module, number in own.items() if module)
                untold = None in own or any(module is None for module in seen.get((kind, ""), ()))
                if not untold and meant != there and sum(meant) == sum(there):
                    counts = f"{_in_words(there)}, where {_in_words(meant)} are meant"
                    return f"other modules: {kind} in {phase} comes from {counts}"
        return ""


def _in_words(numbers: Sequence[int]) -> str:
    """ "2 modules of 8 calls each"."""
    least, most = numbers[0], numbers[-1]
    each = f"{least} calls each" if least == most else f"{least} to {most} calls each"
    return f"{len(numbers)} module{'s' * (len(numbers) > 1)} of {each}"


def _terms_of_trace(trace: Trace, case: CaseLike, subject: Any, terms: Sequence[Term]) -> list[Any]:
    """The closed form of the trace's steps; of the whole run where it has none."""
    if not trace.steps:
        return select_visible_terms(terms)
    found, untold = terms_of(
        range(len(trace.steps)), case, select_visible_terms(terms), getattr(subject, "expected", None)
    )
    if found is None:
        raise RequestError(f"case {case}: {untold}; legal: a trace of the whole run without steps, or another case")
    return list(found)


def _find_compared_fields(calls: Sequence[TracedCall]) -> tuple[_Compared, list[str]]:
    """The fields that are known of every call of an op, and a sentence for each of the others."""
    by_op: dict[str, list[TracedCall]] = {}
    for call in calls:
        by_op.setdefault(call.op, []).append(call)
    found, lacking = defaultdict[str, frozenset[str]](lambda: frozenset(_WORDS)), dict[str, list[str]]()
    for op, own in sorted(by_op.items()):
        unknown = {
            "axis": sum(not call.group for call in own),
            "group_size": sum(call.group_size is None for call in own),
            "dtype": sum(not call.dtype and call.op != "barrier" for call in own),
            "payload_bytes": sum(call.payload_bytes is None for call in own),
        }
        found[op] = frozenset(name for name, number in unknown.items() if not number)
        for name, number in unknown.items():
            if number:
                lacking.setdefault(name, []).append(f"{number} of {len(own)} {op}")
    found[""] = frozenset(_WORDS).intersection(*found.values())
    return found, [f"not compared: {_WORDS[name]}, unknown for {', '.join(ops)}" for name, ops in lacking.items()]


class _GroupNames:
    """Names of the groups of a rank: axes of the closed form that have the same ranks there are one group."""

    def __init__(self, rank: int, world_size: int, axes: Axes, form: ClosedForm) -> None:
        self._world_size, self._axes = world_size, axes
        self._of_axis: dict[str, tuple[int, ...]] = {}
        for axis in {key.axis for key in form.complete} | {term.axis for term in form.partial if term.axis}:
            lists = axes.get(axis, (tuple(range(world_size)),) if axis == "world" else ())
            if own := next((ranks for ranks in lists if rank in ranks), None):
                self._of_axis[axis] = tuple(sorted(own))
        self._names: dict[tuple[int, ...], str] = {}
        for axis, ranks in sorted(self._of_axis.items()):
            self._names[ranks] = f"{self._names[ranks]} or {axis}" if ranks in self._names else axis

    def of_call(self, call: TracedCall) -> str:
        """The name of a call's group; that of another one where it is none of the closed form."""
        known = self._names.get(tuple(sorted(call.group)))
        return known or axis_name(call.group, call.group_desc, self._axes, self._world_size)[0]

    def of_axis(self, axis: str) -> str:
        """The name of an axis of the closed form."""
        return self._names[self._of_axis[axis]] if axis in self._of_axis else axis


def _kind_of_call(call: TracedCall, groups: _GroupNames, compared: _Compared) -> CallKind:
    known = compared[call.op]
    axis = groups.of_call(call) if "axis" in known else ""
    size, payload = call.group_size, call.payload_bytes
    return CallKind(
        call.op,
        axis,
        -1 if size is None or "group_size" not in known else size,
        call.dtype if "dtype" in known else "",
        -1 if payload is None or "payload_bytes" not in known else payload,
    )


def _kind_of_key(key: EventKey, groups: _GroupNames, compared: _Compared) -> CallKind:
    known = compared[key.op]
    return CallKind(
        key.op,
        groups.of_axis(key.axis) if "axis" in known else "",
        key.group_size if "group_size" in known else -1,
        key.dtype if "dtype" in known else "",
        key.payload_bytes if "payload_bytes" in known else -1,
    )


def _find_unmeant(
    kinds: Sequence[CallKind],
    calls: Sequence[TracedCall],
    stated: Sequence[_MeantCalls],
    partial: Sequence[Term],
    compared: _Compared,
) -> list[Unmeant]:
    """The differences of one rank."""
    meant, places = Counter[CallKind](), dict[CallKind, Counter[str]]()
    for kind, key, number in stated:
        meant[kind] += number
        places.setdefault(kind, Counter())[key.place] += number
    there = Counter(kinds)
    surplus, lack = there - meant, meant - there
    first: dict[CallKind, str] = {}
    for kind, call in zip(kinds, calls, strict=True):
        first.setdefault(kind, _seen_at(call))
    wrong = []
    for term in partial:
        wrong += _take_partial(term, there, surplus, compared)
    for alike in _ALIKE:
        for missing in sorted(lack):
            for extra in [kind for kind in sorted(surplus) if alike(kind) == alike(missing)]:
                if number := min(surplus[extra], lack[missing]):
                    wrong.append(Unmeant(found=extra, meant=missing, calls=number, where=first[extra]))
                    surplus[extra] -= number
                    lack[missing] -= number
    wrong += [Unmeant(found=k, meant=None, calls=n, where=first[k]) for k, n in surplus.items() if n > 0]
    return wrong + [Unmeant(found=None, meant=k, calls=n, where=_meant_in(places[k])) for k, n in lack.items() if n > 0]


_ALIKE = (
    lambda kind: (kind.op, kind.axis, kind.group_size, kind.dtype),
    lambda kind: (kind.op, kind.dtype, kind.payload_bytes),
    lambda kind: (kind.op, kind.axis, kind.group_size),
)
"""What a call of the trace has in common with the one that it stands for: all but bytes, all but the group, the
group."""


def _take_partial(
    term: Term, there: Counter[CallKind], surplus: Counter[CallKind], compared: _Compared
) -> list[Unmeant]:
    """Take the calls that a term with fields left out counts from the surplus; a difference where it counts others."""
    fields = compared[term.op or ""]
    known = ("op", *sorted(fields))
    stated = {name: getattr(term, name) for name in known if getattr(term, name) is not None}
    counted = [kind for kind in there if all(getattr(kind, name) == value for name, value in stated.items())]
    for kind in counted:
        surplus.pop(kind, None)
    calls = sum(there[kind] for kind in counted)
    total = sum(there[kind] * kind.payload_bytes for kind in counted)
    where = f"the closed form states {term}, and the trace has {calls} calls"
    blank = CallKind(str(stated.get("op", "")), str(stated.get("axis", "")), int(stated.get("group_size", -1)), "", -1)
    if term.calls is not None and calls != term.calls:
        extra, off = calls > term.calls, abs(calls - term.calls)
        return [Unmeant(found=blank if extra else None, meant=None if extra else blank, calls=off, where=where)]
    if term.total_bytes is not None and "payload_bytes" in fields and total != term.total_bytes:
        return [
            Unmeant(
                found=blank._replace(payload_bytes=total),
                meant=blank._replace(payload_bytes=term.total_bytes),
                calls=calls,
                where=where,
            )
        ]
    return []


def _seen_at(call: TracedCall) -> str:
    """Where the trace has a call, as far as it knows."""
    step = f"step {call.step}" if call.step is not None else ""
    parts = [step, call.phase, call.module or "", f"at {call.caller}" if call.caller else ""]
    text = ", ".join(part for part in parts if part)
    return f"first in {text}" if text else ""


def _meant_in(places: Mapping[str, int]) -> str:
    first, *more = places
    return f"meant in {first}" + (f" and {len(more)} more places" if more else "")


def _order_of_unmeant(one: Unmeant) -> tuple[int, str]:
    return (0 if one.found is None else 1 if one.meant is None else 2), str(one)
