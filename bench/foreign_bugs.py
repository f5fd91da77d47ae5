"""Found when wrong: drawn wrong edits of every foreign subject, and what passes with the limit that let it pass.

    python -m bench.foreign_bugs --edits 10 --out DIR

For each edit the subject runs with it and without. The change of every tensor that it returns is then measured, and of
every update (a parameter's last value without its first). An edit is `found` when a check fails, `undecided` when one
is unknown, `without effect` when no bit of the outcome changes, else `passed`. Edits that passed are listed with the
tensor whose change is largest in units of its limit. A change beyond its limit is a defect of the checks. `rounding` is
how far the right run is from the truth in the same measure: the effect of rounding on this very tensor. An update is
`hidden` that an edit changes by more than HIDDEN times what rounding does to it, while all checks pass.

`foreign_bugs-*.csv` has one row for every edit. Changes, limits and roundings are ratios.
"""

import argparse
import csv
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from bench.foreign_cases import DTYPES, SUBJECTS, Drawn, drawn_cases
from bench.foreign_edits import Planted, drawn_edit, planting
from harness.checking.evidence import FAIL, UNKNOWN, Evidence
from harness.checking.measures.distance import distance
from harness.checking.measures.kinds import kind_of
from harness.checking.measures.many_tensors import kind_rms
from harness.checking.measuring import compared
from harness.engines.threads.inproc import InprocEngine
from harness.errors import RequestError, ShardproofError
from harness.outcome.merging import Merged, merge
from harness.running.proof import prove
from harness.running.ranks.execution import execute
from harness.running.result import CaseResult

FOUND, PASSED, UNDECIDED, NOTHING, ALARM = "found", "passed", "undecided", "without effect", "alarm without it"
UPDATED = ("param", "param_after")
HIDDEN = 3.0
"""How many times the effect of rounding a change of an update may be before it is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """An edit and what became of it. `check` found it; "" where none did.

    `tensor` is the one whose `change` is largest in units of its `limit`, in this `measure`; `rounding` is the error of
    the right run there. `updated` is the parameter whose update changed most in units of what rounding did to it in the
    right run. `update_change` and `update_rounding` are shares of the truth's update. `defect`: passed beyond a limit.
    """

    subject: str
    case: str
    dtype: str
    edit: str
    verdict: str
    check: str = ""
    tensor: str = ""
    measure: str = ""
    change: float = 0.0
    limit: float = 0.0
    rounding: float = 0.0
    decided: bool = False
    updated: str = ""
    update_change: float = 0.0
    update_rounding: float = 0.0
    defect: bool = False
    seconds: float = 0.0

    @property
    def hidden(self) -> bool:
        """Whether all checks pass, and an update differs by more than rounding explains."""
        return self.verdict == PASSED and self.update_change > HIDDEN * self.update_rounding


def campaign(edits: int, first_seed: int, names: Sequence[str], dtype: str, timeout_s: float) -> Iterator[Row]:
    """A row for every edit, subject by subject in turn."""
    with InprocEngine() as engine, planting():
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
            return replace(row, check=_failed(without))
        start = execute(case, still, engine, record=False, timeout_s=timeout_s)
        edit = drawn_edit(still.counts, case.dtype, chosen)
        row = replace(row, edit=str(edit))
        wrong = prove(case, Planted(drawn.subject, edit).named, engine, timeout_s=timeout_s, explain=False)
    except ShardproofError as error:
        return replace(row, check="run", tensor=str(error)[:200])
    first = {name: tensor for name, tensor in merge(start.outcomes).tensors.items() if kind_of(name) in UPDATED}
    if wrong.verdict == FAIL:
        row = replace(row, verdict=FOUND, check=_failed(wrong))
    if wrong.evidence is None:
        return row
    row = _measured(row, without.evidence, wrong.evidence, first)
    if wrong.verdict == FAIL:
        return replace(row, defect=False)
    if not _changed(without.evidence, wrong.evidence):
        return replace(row, verdict=NOTHING, defect=False)
    return replace(row, verdict=UNDECIDED if wrong.verdict == UNKNOWN else PASSED)


def _failed(result: CaseResult) -> str:
    return ", ".join(each.check for each in result.verdicts if each.verdict == FAIL)


def _changed(without: Evidence, wrong: Evidence) -> list[str]:
    """Names of tensors that the edit changes in any bit."""
    both = wrong.merged.tensors.keys() & without.merged.tensors.keys()
    return [name for name in both if not torch.equal(wrong.merged.tensors[name], without.merged.tensors[name])]


def _measured(row: Row, without: Evidence, wrong: Evidence, first: Mapping[str, Tensor]) -> Row:
    """The row with the tensor, and the update, that the edit changes most in units of limit and of rounding."""
    rms = kind_rms(wrong.truth)
    most, worst = -1.0, row
    for name in _changed(without, wrong):
        truth = wrong.truth.get(name)
        if truth is None or not (truth.is_floating_point() or truth.is_complex()):
            continue
        wide = torch.promote_types(truth.dtype, torch.float64)
        shift = wrong.merged.tensors[name].to(wide) - without.merged.tensors[name].to(wide)
        found = compared(_with(wrong, name, truth.to(wide) + shift), name, rms.get(kind_of(name), 0.0))
        if found.ratio > most:
            own = compared(_with(wrong, name, without.merged.tensors[name]), name, rms.get(kind_of(name), 0.0))
            scaled = distance(without.merged.tensors[name], truth, 1e-3 * rms.get(kind_of(name), 0.0))
            rounding = getattr(scaled, found.measure, own.error)
            most, beyond = found.ratio, found.ratio > 1 and found.decidable
            worst = replace(row, tensor=name, measure=found.measure, change=found.error, limit=found.allowed)
            worst = replace(worst, rounding=rounding, decided=found.decidable, defect=beyond)
    return _with_update(worst, without, wrong, first)


def _with(evidence: Evidence, name: str, tensor: Tensor) -> Evidence:
    """The evidence as if this tensor had been returned."""
    merged = Merged(tensors={**evidence.merged.tensors, name: tensor}, flaws=())
    return replace(evidence, merged=merged)


def _with_update(row: Row, without: Evidence, wrong: Evidence, first: Mapping[str, Tensor]) -> Row:
    """The row with the update that changes most, in units of what rounding does to it."""
    most, found = 0.0, row
    for name in _changed(without, wrong):
        if kind_of(name) not in UPDATED or name not in first or name not in wrong.truth:
            continue
        begin, truth = _wide(first[name]), _wide(wrong.truth[name])
        moved = float((truth - begin).norm())
        change = float((_wide(wrong.merged.tensors[name]) - _wide(without.merged.tensors[name])).norm())
        error = float((_wide(without.merged.tensors[name]) - truth).norm())
        ratio = change / error if error else math.inf
        if moved and ratio > most:
            most = ratio
            found = replace(row, updated=name, update_change=change / moved, update_rounding=error / moved)
    return found


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
    """Lines of text: what was not found, the largest change in units of its limit first, then counts."""
    left = [row for row in rows if row.verdict in (PASSED, UNDECIDED)]
    for row in sorted(left, key=lambda row: row.change / row.limit if row.limit else 0.0, reverse=True):
        mark = "DEFECT " if row.defect else ""
        yield f"{mark}{row.verdict}: {row.subject} {row.case!r}: {row.edit}"
        limit = f"limit {row.limit:.2g} ({row.measure}{'' if row.decided else ', undecided'})"
        yield f"    {row.tensor}: change {row.change:.2g}, {limit}, rounding {row.rounding:.2g}"
        if row.updated:
            seen = "HIDDEN update" if row.hidden else "update"
            yield f"    {seen} of {row.updated}: change {row.update_change:.2g}, rounding {row.update_rounding:.2g}"
    for dtype in DTYPES:
        counts = Counter(row.verdict for row in rows if row.dtype == dtype)
        words = ", ".join(f"{many} {verdict}" for verdict, many in sorted(counts.items()))
        yield f"{dtype}: {counts.total()} edits: {words or 'none'}"
    beyond, hidden = sum(row.defect for row in rows), sum(row.hidden for row in rows)
    yield f"{beyond} passed although the change is beyond its limit, {hidden} although an update hides it"


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
