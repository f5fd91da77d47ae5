"""Plants random wrong edits in every foreign subject, and lists those that pass with the limit that let them pass.

    python -m bench.foreign_bugs --edits 10 --out DIR

For each edit the subject runs with it and without. An edit is `found` if a check fails, `undecided` if one is unknown,
`without effect` if no bit of the outcome changes, else `passed`. The change of every tensor is compared with the effect
that rounding had on this very tensor: the distance of the right run from the truth. For a parameter both are shares of
its movement, its value less its first value. The checks promise (docs/checks.md) to allow FACTOR times that effect of
rounding, or the floors of the dtype if they are more. Half an epsilon of a stored parameter is added for every step.

One right run may be near the truth by luck, for example with two elements, or because run and truth round alike to a
lower precision than the case's. So a change beyond BOTH times what is allowed is also compared with MORE right runs, in
which all numbers are moved by a random part of their rounding.

If it is beyond that too, it is a defect of the checks. `foreign_bugs-*.csv` has one row for every edit. Changes and
roundings are shares of the truth, for parameters of their movement.

Cases are drawn for all subjects of `bench.foreign` in turn: layouts, sizes, seeds and dtypes. A subject may state as
`dtypes` the dtypes that it takes; otherwise it takes those of DTYPES.
"""

import argparse
import csv
import math
import pkgutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from bench import foreign
from bench.foreign_edits import Planted, drawn_edit, plant_edits
from shardproof.harness.checking.measures.kinds import kind_of, step_of
from shardproof.harness.checking.measures.many_tensors import kind_rms
from shardproof.harness.checking.measures.measured import FLOAT64_ALLOWED, SCALE_SHARE, epsilon
from shardproof.harness.checking.measures.tolerance import CONTROL_FACTOR, FLOOR_EPSILONS, OWN_EPSILONS
from shardproof.harness.checking.measuring import compare_with_truth, sizes_of
from shardproof.harness.checking.records import Evidence
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.errors import RequestError, ShardproofError
from shardproof.harness.outcome.merging import merge_outcomes
from shardproof.harness.plain_case import PlainCase
from shardproof.harness.protocols import CaseLike
from shardproof.harness.recording.capturing.operator_probes import narrower
from shardproof.harness.running.proof import prove
from shardproof.harness.running.ranks.execution import execute
from shardproof.harness.running.result import CaseResult
from shardproof.harness.subject import NamedSubject, claims, refusal, resolve_subject
from shardproof.harness.verdicts.verdict import FAIL, UNKNOWN
from shardproof.suites.drawing.own_cases import cases_around
from shardproof.suites.drawing.profiles import draw_samples

DTYPES = ("float64", "float32", "bfloat16")
SUBJECTS = tuple(sorted(module.name for module in pkgutil.iter_modules(foreign.__path__)))
"""Names of the modules of `bench.foreign`, each with one subject."""


class Drawn(NamedTuple):
    """A case and the subject that takes it."""

    subject: NamedSubject
    case: CaseLike


def subject_of(name: str) -> NamedSubject:
    """The foreign subject of this module. Raises RequestError where there is none."""
    if name not in SUBJECTS:
        raise RequestError(f"subject={name}: is no foreign subject; legal: {', '.join(SUBJECTS)}")
    return resolve_subject(f"{foreign.__name__}.{name}:subject")


def drawn_cases(count: int, first_seed: int = 0, names: Sequence[str] = SUBJECTS, dtype: str = "any") -> list[Drawn]:
    """`count` cases, the same for the same arguments. The subjects take turns."""
    names = [name for name in names if _dtypes(name, dtype)]
    shares = {name: count // len(names) + (place < count % len(names)) for place, name in enumerate(names)}
    of_subjects = [_cases_of(name, share, first_seed, dtype) for name, share in shares.items()]
    turns = [iter(cases) for cases in of_subjects]
    return [case for _ in range(max(shares.values(), default=0)) for turn in turns if (case := next(turn, None))]


def _cases_of(name: str, share: int, first_seed: int, dtype: str) -> list[Drawn]:
    """Cases of one subject; dtypes take turns, and layouts are drawn."""
    subject = subject_of(name)
    dtypes = _dtypes(name, dtype)
    shares = {known: share // len(dtypes) + (place < share % len(dtypes)) for place, known in enumerate(dtypes)}
    modes = claims(subject).modes
    of_dtypes = []
    for place, (known, many) in enumerate(shares.items()):
        of_modes = [cases_around(subject, mode, {"dtype": known}) for mode in modes]
        legal = st.one_of(of_modes).filter(lambda case: not refusal(case, subject))
        of_dtypes.append(draw_samples(legal, many, 1000 * first_seed + place))
    return [Drawn(subject, case) for case in _in_turn(of_dtypes)]


def _dtypes(name: str, dtype: str) -> list[str]:
    return [known for known in getattr(subject_of(name).call, "dtypes", DTYPES) if dtype in ("any", known)]


def _in_turn(lists: Sequence[Sequence[PlainCase]]) -> Iterator[PlainCase]:
    for place in range(max(map(len, lists), default=0)):
        yield from (cases[place] for cases in lists if place < len(cases))


FOUND, PASSED, UNDECIDED, NOTHING, ALARM = "found", "passed", "undecided", "without effect", "alarm without it"
MOVED = ("param", "param_after")
FACTOR = CONTROL_FACTOR
"""A right result may be off by this many times the effect of rounding in one right run, as the checks allow."""
MORE = 3
"""The number of further right runs if one run does not explain a change."""
BOTH = 2.0
"""A change of this many times what is allowed is no defect: the right run and the wrong one may each be off by that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A tensor that an edit changes: its `change` and the `rounding` of the right run, in the measure `by`.

    `units` is the change in units of what is allowed. `error`, `limit` and `measure` are what the checks find for this
    tensor in the wrong run. It is `decided` if half of the tensor would not be within the limit.
    """

    tensor: str = ""
    units: float = 0.0
    by: str = ""
    change: float = 0.0
    rounding: float = 0.0
    error: float = 0.0
    limit: float = 0.0
    measure: str = ""
    decided: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(Change):
    """An edit, its verdict, and the tensor that it changes most. `check` is the check that found it, "" if none did."""

    subject: str
    case: str
    dtype: str
    edit: str
    verdict: str
    check: str = ""
    seconds: float = 0.0

    @property
    def defect(self) -> bool:
        """Whether the edit passed although it changes a tensor by more than rounding may change it."""
        return self.verdict == PASSED and self.units > BOTH


def campaign(edits: int, first_seed: int, names: Sequence[str], dtype: str, timeout_s: float) -> Iterator[Row]:
    """A row for every edit; the subjects take turns."""
    with InprocEngine() as engine, plant_edits():
        for number, drawn in enumerate(drawn_cases(edits * len(names), first_seed, names, dtype)):
            start_s = time.perf_counter()
            row = judged_edit(drawn, Random(f"{first_seed} {number}"), engine, timeout_s)
            yield replace(row, seconds=round(time.perf_counter() - start_s, 2))


def judged_edit(drawn: Drawn, chosen: Random, engine: InprocEngine, timeout_s: float) -> Row:
    """Row of one drawn edit of this case."""
    case = drawn.case
    still = Planted(drawn.subject, frozen=True)
    row = Row(subject=drawn.subject.name, case=str(case), dtype=case.dtype, edit="none", verdict=ALARM)
    try:
        without = prove(case, Planted(drawn.subject).named, engine, timeout_s=timeout_s, explain=False)
        if without.verdict == FAIL or without.evidence is None:
            return replace(row, check=_failed_checks(without))
        start = execute(case, still, engine, record=False, timeout_s=timeout_s)
        edit = drawn_edit(still.counts, case.dtype, chosen)
        row = replace(row, edit=str(edit))
        wrong = prove(case, Planted(drawn.subject, edit).named, engine, timeout_s=timeout_s, explain=False)
    except ShardproofError as error:
        return replace(row, check=f"run: {error}"[:200])
    verdicts = {FAIL: FOUND, UNKNOWN: UNDECIDED}
    row = replace(row, verdict=verdicts.get(wrong.verdict, PASSED), check=_failed_checks(wrong))
    if wrong.evidence is None:
        return row
    first = {name: tensor for name, tensor in merge_outcomes(start.outcomes).tensors.items() if kind_of(name) in MOVED}
    changes = list(_changes(without.evidence, wrong.evidence, first))
    if not changes and row.verdict != FOUND:
        return replace(row, verdict=NOTHING)
    if row.verdict == PASSED and max(one.units for one in changes) > BOTH:
        more = [_moved_run(drawn, engine, seed, timeout_s) for seed in range(1, 1 + MORE)]
        changes = list(_changes(without.evidence, wrong.evidence, first, more))
    most = max(changes, key=lambda one: one.units, default=Change())
    return replace(row, **asdict(_with_limit(most, wrong.evidence)))


def _moved_run(drawn: Drawn, engine: InprocEngine, seed: int, timeout_s: float) -> dict[str, Tensor]:
    """The tensors of a right run whose numbers in the case's dtype and in lower ones are moved by random rounding."""
    dtypes = (drawn.case.dtype, *narrower(drawn.case.dtype))
    moved = Planted(drawn.subject, moves={getattr(torch, dtype): epsilon(dtype) for dtype in dtypes}, seed=seed)
    merged = merge_outcomes(execute(drawn.case, moved, engine, record=False, timeout_s=timeout_s).outcomes)
    # Replicas differ here, because each rank's numbers are moved by themselves.
    replicas = {flaw.name: flaw.value for flaw in merged.flaws if flaw.value is not None}
    return {**replicas, **merged.tensors}


def _failed_checks(result: CaseResult) -> str:
    return ", ".join(each.check for each in result.verdicts if each.verdict == FAIL)


def _changes(
    without: Evidence, wrong: Evidence, first: Mapping[str, Tensor], more: Sequence[Mapping[str, Tensor]] = ()
) -> Iterator[Change]:
    """The changes of all tensors whose bits differ; `more` are right runs that round in other ways."""
    sizes = kind_rms(wrong.truth.tensors)
    for name, tensor in wrong.run.tensors.items():
        right, truth = without.run.tensors.get(name), wrong.truth.tensors.get(name)
        if right is None or truth is None or torch.equal(right, tensor):
            continue
        if not truth.is_floating_point() and not truth.is_complex():
            yield Change(tensor=name, units=math.inf, by="exact")
            continue
        shift = (_wide(tensor) - _wide(truth)) - (_wide(right) - _wide(without.truth.tensors[name]))
        errors, moved = [_wide(right) - _wide(without.truth.tensors[name])], _wide(without.truth.tensors[name])
        errors += [_wide(run[name]) - _wide(right) for run in more if name in run]
        stored = torch.zeros_like(moved)
        if name in first:
            steps = wrong.run.case.steps if kind_of(name) == "param" else step_of(name) + 1
            stored, moved = moved * steps, moved - _wide(first[name])
        scale = SCALE_SHARE * sizes.get(kind_of(name), 0.0) if name not in first else 0.0
        yield change(name, shift, errors, moved, stored, units_of(tensor.dtype), scale)


def change(
    name: str,
    shift: Tensor,
    errors: Sequence[Tensor],
    moved: Tensor,
    stored: Tensor,
    floors: Mapping[str, float],
    least: float,
) -> Change:
    """The change in the measure with the most `units`; `errors` are the effects of rounding."""
    own, half = floors["own"], floors["half"]
    rms = max(float(moved.norm()) / math.sqrt(moved.numel() or 1), least)
    out = shift[shift.abs() > own * moved.abs()]
    found = {
        "frobenius": (shift.norm(), max(map(torch.norm, errors)), rms * math.sqrt(moved.numel()), stored.norm()),
        "peak": (_largest(out), max(map(_largest, errors)), rms, _largest(stored)),
    }
    changes = []
    for by, numbers in found.items():
        shifted, rounding, size, kept = map(float, numbers)
        allowed = max(FACTOR * rounding, floors[by] * size) + half * kept
        units = shifted / allowed if allowed else math.inf if shifted else 0.0
        changes.append(
            Change(tensor=name, units=units, by=by, change=shifted / (size or 1), rounding=rounding / (size or 1))
        )
    return max(changes, key=lambda one: one.units)


def units_of(dtype: torch.dtype) -> Mapping[str, float]:
    """For this dtype: the floors of each measure, the relative error that an element may have, half an epsilon."""
    if dtype in (torch.float64, torch.complex128):
        return {"frobenius": FLOAT64_ALLOWED, "peak": FLOAT64_ALLOWED, "own": 0.0, "half": 0.0}
    epsilon = torch.finfo(dtype).eps
    return {
        **{measure: many * epsilon for measure, many in FLOOR_EPSILONS.items()},
        "own": OWN_EPSILONS * epsilon,
        "half": epsilon / 2,
    }


def _with_limit(one: Change, wrong: Evidence) -> Change:
    """The change, with the limit that the checks set for this tensor of the wrong run."""
    if not one.tensor or one.by == "exact":
        return one
    size = sizes_of(wrong.run, wrong.truth).get(kind_of(one.tensor), 0.0)
    found = compare_with_truth(wrong.run, wrong.truth, one.tensor, size)
    return replace(
        one, error=found.error, limit=found.allowed, measure=found.measure, decided=found.decidable or found.zero
    )


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float64))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign, write its table, print what passed. Exit status: 0 no defect, 1 a defect, 2 a wrong request."""
    asked = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    out, rows = Path(asked.out), list[Row]()
    out.mkdir(parents=True, exist_ok=True)
    names = asked.subject or SUBJECTS
    try:
        with (out / f"foreign_bugs-{asked.dtype}-{asked.first_seed}.csv").open("w", newline="") as table:
            written = csv.DictWriter(table, [each.name for each in fields(Row)])
            written.writeheader()
            for row in campaign(asked.edits, asked.first_seed, names, asked.dtype, asked.timeout_s):
                rows.append(row)
                written.writerow(asdict(row))
                table.flush()
    except RequestError as error:
        print(f"bench.foreign_bugs: {error}", file=sys.stderr)
        return error.exit_status
    print(*report(rows), sep="\n")
    return 1 if any(row.defect for row in rows) else 0


def report(rows: Sequence[Row]) -> Iterator[str]:
    """Lines of text: what was not found, defects first and then by units of what is allowed; then counts."""
    left = [row for row in rows if row.verdict in (PASSED, UNDECIDED)]
    for row in sorted(left, key=lambda row: (row.defect, row.units), reverse=True):
        yield f"{'DEFECT ' if row.defect else ''}{row.verdict}: {row.subject} {row.case!r}: {row.edit}"
        decided = "" if row.decided else ", undecided"
        limit = f"{row.measure} {row.error:.2g} of {row.limit:.2g}{decided}"
        shift = f"change {row.change:.2g} beside a rounding of {row.rounding:.2g} ({row.by})"
        yield f"    {row.tensor}: {shift}, {row.units:.2g} of what is allowed; checked: {limit}"
    for dtype in DTYPES:
        counts = Counter(row.verdict for row in rows if row.dtype == dtype)
        words = ", ".join(f"{many} {verdict}" for verdict, many in sorted(counts.items()))
        yield f"{dtype}: {counts.total()} edits: {words or 'none'}"
    yield f"{sum(row.defect for row in rows)} passed although they change a tensor by more than rounding may"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.foreign_bugs", description="Plant wrong edits and count.")
    parser.add_argument("--edits", type=int, default=10, metavar="N", help="edits of each subject (10)")
    parser.add_argument("--subject", action="append", choices=SUBJECTS, help="of these subjects alone (all)")
    parser.add_argument("--dtype", choices=("any", *DTYPES), default="any", help="dtype of every case (any)")
    parser.add_argument("--timeout", dest="timeout_s", type=float, default=60.0, metavar="S", help="of a case (60)")
    parser.add_argument("--seed", dest="first_seed", type=int, default=0, metavar="N", help="other seeds, other edits")
    parser.add_argument("--out", default="runs/foreign_bugs", metavar="DIR", help="where the table goes")
    return parser


if __name__ == "__main__":
    sys.exit(main())
