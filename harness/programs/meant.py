"""Compares calls in traces with a closed form: which are missing or extra, or have other bytes, dtype, group or phase.

A call is compared by its op, group, dtype and payload. A field that is unknown for some call of an op is not compared
for that op. Phases are compared if the trace has modules, since forward and loss, or backward and recompute, cannot be
told apart without them. A phase that an annotation of the user states is not compared. Traces name the class of a
module and a closed form its path, so modules are compared by number: how many there are, and how many calls each
issues. Programs may nest modules in other ways, so a difference of modules is a note. The closed form is that of one
step times the steps of the trace, or of the whole run if the trace has no steps.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from shardproof.harness.errors import RequestError, name_ranks, ranks_text
from shardproof.harness.mesh_axes import split_axes
from shardproof.harness.protocols import Axes, CaseLike
from shardproof.harness.recording.naming import axis_name
from shardproof.harness.subject import named_axes, state_terms
from shardproof.harness.terms import ClosedForm, EventKey, Term, closed_forms, select_visible_terms
from shardproof.harness.traces.calls import Trace, TracedCall
from shardproof.harness.witnesses.chosen import terms_of


class CallKind(NamedTuple):
    """What is compared of a call. Fields with the value "" or -1 are not compared."""

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
    """A difference from the closed form, of as many `calls` on each of `ranks`; `where` is a place in words.

    `found` is None if they are missing, and `meant` is None if they are extra. `phases` are the phase of the trace and
    the phases that are meant, if nothing else differs.
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
    """A comparison of `calls` calls: where they differ from the closed form, and notes on what was not compared."""

    calls: int
    unmeant: tuple[Unmeant, ...]
    notes: tuple[str, ...]


def compare_with_form(traces: Sequence[Trace], case: CaseLike, subject: Any, text: str = "") -> AgainstForm:
    """Compare every call of these traces with the closed form of a case, which errors name by its `text` as typed.

    Raises RequestError if the subject states none, the world has other ranks, or steps cannot be told apart.
    """
    axes, terms = named_axes(case, subject), state_terms(case, subject)
    if terms is None:
        raise RequestError(f"case {case}: its subject states no closed form; legal: a subject with `expected`")
    _require_ranks_of_case(traces, case, text or str(case))
    calls = {trace.rank or 0: _calls_in_steps(trace) for trace in traces}
    every = [call for own in calls.values() for call in own]
    compared, not_compared = _find_compared_fields(every)
    unmeant: dict[Unmeant, list[int]] = {}
    other_modules: dict[str, list[int]] = {}
    for trace in traces:
        rank = trace.rank or 0
        form = closed_forms(_terms_of_trace(trace, case, subject, terms), (rank,), axes)[rank]
        of_rank = _RankComparison(calls[rank], form, _GroupNames(rank, case.world_size, axes, form), compared)
        for one in of_rank.find_unmeant():
            unmeant.setdefault(one, []).append(rank)
        if sentence := of_rank.describe_other_modules():
            other_modules.setdefault(sentence, []).append(rank)
    notes = [*_note_calls_left_out(traces, len(every)), *not_compared, *_phase_notes(every)]
    notes += [f"{sentence} ({name_ranks(ranks)})" for sentence, ranks in other_modules.items()]
    joined = sorted((replace(one, ranks=tuple(ranks)) for one, ranks in unmeant.items()), key=_order_of_unmeant)
    return AgainstForm(calls=len(every), unmeant=tuple(joined), notes=(*notes, _NEVER_COMPARED))


_NEVER_COMPARED = "not compared: reduce op, which traces of torch do not hold"


def _require_ranks_of_case(traces: Sequence[Trace], case: CaseLike, text: str) -> None:
    """Raise RequestError unless the job of the traces has the ranks of the case."""
    worlds = {trace.world_size for trace in traces} - {None}
    if worlds - {case.world_size} or any((trace.rank or 0) >= case.world_size for trace in traces):
        there = ranks_text(sorted(world or 0 for world in worlds)) or max(trace.rank or 0 for trace in traces) + 1
        layout = " ".join(f"{axis}={size}" for axis, size in split_axes(case).items()) or "one rank"
        rule = f"its layout ({layout}) has {case.world_size} ranks, and the job of the traces has {there}"
        legal = f"a case whose axes give {there} ranks; an axis that is not written has its default"
        raise RequestError(f"case {text!r}: {rule}; legal: {legal}")


def _calls_in_steps(trace: Trace) -> list[TracedCall]:
    """The calls inside of the profiler's steps; all calls if the trace has no steps."""
    return [call for call in trace.calls if call.step is not None or not trace.steps]


def _note_calls_left_out(traces: Sequence[Trace], compared: int) -> Iterator[str]:
    if outside := sum(len(trace.calls) for trace in traces) - compared:
        yield f"not compared: {outside} calls outside of the steps of the profiler"
    for trace in traces:
        if trace.lost and not trace.steps:
            yield f"calls before the first one of rank {trace.rank} are lost, and told as missing: {trace.lost}"


def _phase_notes(calls: Sequence[TracedCall]) -> list[str]:
    lacking = sum(not _has_known_phase(call) for call in calls)
    if not any(call.module is not None for call in calls):
        return ["not compared: phase and module, of traces without modules (profile(with_stack=True) records them)"]
    return [f"not compared: phase, not known for {lacking} of {len(calls)} calls"] if lacking else []


def _has_known_phase(call: TracedCall) -> bool:
    """Whether a call has a phase that can be compared: an annotation may enclose more than the phase it names."""
    return bool(call.phase) and not call.is_phase_annotated


_WORDS = {"axis": "group", "group_size": "size of the group", "dtype": "dtype", "payload_bytes": "bytes"}
"""Fields that are compared beside the op, in words."""
_Compared = Mapping[str, frozenset[str]]
"""The fields that are compared, by op; under "" those that are compared for every op."""


def _find_compared_fields(calls: Sequence[TracedCall]) -> tuple[_Compared, list[str]]:
    """The fields that every call of an op has, by op, and a sentence for each field that some calls lack."""
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


def _terms_of_trace(trace: Trace, case: CaseLike, subject: Any, terms: Sequence[Term]) -> list[Any]:
    """The closed form of the trace's steps; of the whole run if it has none."""
    if not trace.steps:
        return select_visible_terms(terms)
    found, untold = terms_of(
        range(len(trace.steps)), case, select_visible_terms(terms), getattr(subject, "expected", None)
    )
    if found is None:
        raise RequestError(f"case {case}: {untold}; legal: a trace of the whole run without steps, or another case")
    return list(found)


class _GroupNames:
    """Names of the groups of one rank. Axes of the closed form that have the same ranks share a name: "dp or world"."""

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
        """The name of a call's group, also if the closed form has no such group."""
        known = self._names.get(tuple(sorted(call.group)))
        return known or axis_name(call.group, call.group_desc, self._axes, self._world_size)[0]

    def of_axis(self, axis: str) -> str:
        """The name of an axis of the closed form."""
        return self._names[self._of_axis[axis]] if axis in self._of_axis else axis


def _kind_of_call(call: TracedCall, groups: _GroupNames, known: frozenset[str]) -> CallKind:
    size, payload = call.group_size, call.payload_bytes
    return CallKind(
        call.op,
        groups.of_call(call) if "axis" in known else "",
        size if size is not None and "group_size" in known else -1,
        call.dtype if "dtype" in known else "",
        payload if payload is not None and "payload_bytes" in known else -1,
    )


def _kind_of_key(key: EventKey, groups: _GroupNames, known: frozenset[str]) -> CallKind:
    return CallKind(
        key.op,
        groups.of_axis(key.axis) if "axis" in known else "",
        key.group_size if "group_size" in known else -1,
        key.dtype if "dtype" in known else "",
        key.payload_bytes if "payload_bytes" in known else -1,
    )


_ALIKE = (
    lambda kind: (kind.op, kind.axis, kind.group_size, kind.dtype),
    lambda kind: (kind.op, kind.dtype, kind.payload_bytes),
    lambda kind: (kind.op, kind.axis, kind.group_size),
)
"""An extra call stands for a missing one that agrees with it in all but bytes, else in all but the group, else in the
group."""


class _RankComparison:
    """The calls of one rank beside its closed form: how many of each kind the trace has, and how many are meant."""

    def __init__(self, calls: Sequence[TracedCall], form: ClosedForm, groups: _GroupNames, compared: _Compared) -> None:
        self._compared = compared
        self._calls = [(_kind_of_call(call, groups, compared[call.op]), call) for call in calls]
        self._traced = Counter(kind for kind, _ in self._calls)
        self._has_modules = any(call.module is not None for call in calls)
        self._partial = [replace(term, axis=groups.of_axis(term.axis)) if term.axis else term for term in form.partial]
        self._meant: Counter[CallKind] = Counter()
        self._places: dict[CallKind, Counter[EventKey]] = {}
        for key, number in form.complete.items():
            kind = _kind_of_key(key, groups, compared[key.op])
            self._meant[kind] += number
            self._places.setdefault(kind, Counter())[key] += number

    def find_unmeant(self) -> Iterator[Unmeant]:
        """Every difference of this rank."""
        extra, missing = self._traced - self._meant, self._meant - self._traced
        first: dict[CallKind, str] = {}
        for kind, call in self._calls:
            first.setdefault(kind, _seen_at(call))
        for term in self._partial:
            yield from self._take_partial(term, extra)
        for alike in _ALIKE:
            for meant in sorted(missing):
                for found in [kind for kind in sorted(extra) if alike(kind) == alike(meant)]:
                    if number := min(extra[found], missing[meant]):
                        yield Unmeant(found=found, meant=meant, calls=number, where=first[found])
                        extra[found] -= number
                        missing[meant] -= number
        for kind, number in (+extra).items():
            yield Unmeant(found=kind, meant=None, calls=number, where=first[kind])
        for kind, number in (+missing).items():
            yield Unmeant(found=None, meant=kind, calls=number, where=_meant_in(self._places[kind]))
        if self._has_modules:
            yield from self._find_other_phases()

    def _take_partial(self, term: Term, extra: Counter[CallKind]) -> Iterator[Unmeant]:
        """Take what a term without all fields counts from `extra`. Yields a difference if it counts other calls."""
        fields = self._compared[term.op or ""]
        stated = _stated_fields(term, fields)
        counted = [kind for kind in self._traced if _has_fields(kind, stated)]
        for kind in counted:
            extra.pop(kind, None)
        calls = sum(self._traced[kind] for kind in counted)
        total = sum(self._traced[kind] * kind.payload_bytes for kind in counted)
        where = f"the closed form states {term}, and the trace has {calls} calls"
        known = CallKind(stated.get("op", ""), stated.get("axis", ""), stated.get("group_size", -1), "", -1)
        if term.calls is not None and calls != term.calls:
            found, meant = (known, None) if calls > term.calls else (None, known)
            yield Unmeant(found=found, meant=meant, calls=abs(calls - term.calls), where=where)
        elif term.total_bytes is not None and "payload_bytes" in fields and total != term.total_bytes:
            found, meant = (known._replace(payload_bytes=size) for size in (total, term.total_bytes))
            yield Unmeant(found=found, meant=meant, calls=calls, where=where)

    def _stated_places(self) -> Iterator[tuple[CallKind, Counter[EventKey]]]:
        """The kinds whose phases and modules the closed form states, with the number of calls at each place."""
        for kind, places in self._places.items():
            fields = self._compared[kind.op]
            # A term without all fields may count calls of this kind, and says nothing of their phases and modules.
            if not any(_has_fields(kind, _stated_fields(term, fields)) for term in self._partial):
                yield kind, places

    def _find_other_phases(self) -> Iterator[Unmeant]:
        """Calls in a phase in which fewer are meant.

        As many as the kind has extra calls are left out, since those are a difference already. So are calls of unknown
        phase, which may be of any.
        """
        traced: dict[CallKind, Counter[str]] = {}
        first: dict[tuple[CallKind, str], str] = {}
        for kind, call in self._calls:
            if _has_known_phase(call):
                traced.setdefault(kind, Counter())[call.phase] += 1
                first.setdefault((kind, call.phase), _seen_at(call))
        for kind, places in self._stated_places():
            meant = Counter[str]()
            for key, number in places.items():
                meant[key.phase] += number
            extra = max(0, self._traced[kind] - meant.total())
            own = traced.get(kind, Counter())
            usual = " or ".join(sorted(meant - own))
            for phase, number in sorted((own - meant).items()):
                wrong, extra = max(0, number - extra), max(0, extra - number)
                if wrong and usual:
                    at = first[kind, phase]
                    yield Unmeant(found=kind, meant=kind, calls=wrong, where=at, phases=(phase, usual))

    def describe_other_modules(self) -> str:
        """A sentence if the calls of a kind and phase come from other numbers of modules than meant, else ""."""
        if not self._has_modules:
            return ""
        traced: dict[tuple[CallKind, str], Counter[str | None]] = {}
        for kind, call in self._calls:
            phase = call.phase if _has_known_phase(call) else ""
            traced.setdefault((kind, phase), Counter())[call.module] += 1
        for kind, places in self._stated_places():
            for phase in sorted({key.phase for key in places}):
                modules = Counter[str]()
                for key, number in places.items():
                    if key.phase == phase and key.region:
                        modules[key.region] += number
                own, unplaced = traced.get((kind, phase), Counter()), traced.get((kind, ""), Counter())
                meant = sorted(modules.values())
                found = sorted(number for module, number in own.items() if module)
                is_known = None not in own and None not in unplaced
                if is_known and meant != found and sum(meant) == sum(found):
                    counts = f"{_in_words(found)}, where {_in_words(meant)} are meant"
                    return f"other modules: {kind} in {phase} comes from {counts}"
        return ""


def _stated_fields(term: Term, fields: frozenset[str]) -> dict[str, Any]:
    """The op and those of `fields` that a term states."""
    return {name: value for name in ("op", *sorted(fields)) if (value := getattr(term, name)) is not None}


def _has_fields(kind: CallKind, stated: Mapping[str, Any]) -> bool:
    return all(getattr(kind, name) == value for name, value in stated.items())


def _in_words(numbers: Sequence[int]) -> str:
    """ "2 modules of 8 calls each"."""
    least, most = numbers[0], numbers[-1]
    each = f"{least} calls each" if least == most else f"{least} to {most} calls each"
    return f"{len(numbers)} module{'s' * (len(numbers) > 1)} of {each}"


def _seen_at(call: TracedCall) -> str:
    """Where the trace has a call, as far as it knows."""
    step = f"step {call.step}" if call.step is not None else ""
    parts = [step, call.phase, call.module or "", f"at {call.caller}" if call.caller else ""]
    text = ", ".join(part for part in parts if part)
    return f"first in {text}" if text else ""


def _meant_in(keys: Iterable[EventKey]) -> str:
    """The first of the places at which calls are meant, and the number of others."""
    first, *more = dict.fromkeys(key.place for key in keys)
    return f"meant in {first}" + (f" and {len(more)} more places" if more else "")


def _order_of_unmeant(one: Unmeant) -> tuple[int, str]:
    """Missing calls first, then extra ones, then calls that differ."""
    return (0 if one.found is None else 1 if one.meant is None else 2), str(one)
