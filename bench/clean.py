"""Quiet when right: proves many generated cases of a subject that is right, and lists every verdict that is no pass.

    python -m bench.clean --cases 10000 --part 1/2 --out DIR
    python -m bench.clean --foreign 500

Every check is made on every case, and cases use every word of the case language
(`suites.drawing.strategies.every_word`). Every fifth case has a size that users train (`large_cases`). An alarm is a
verdict `fail`, or a run that ended with an error. Checks that are undecided are counted separately, and so are cases
whose dense model diverges, since they cannot be judged.

Cases are drawn by hypothesis from a seed, in equal shares for all modes. Parts draw from seeds of their own, so that
the processes on a machine share the work. With `--foreign` the cases are those of all subjects in `bench.foreign`, in
turn, so that one process runs many kinds of programs. `clean-*.csv` has one row, written again after every case;
`alarms-*.jsonl` has a line for every verdict that did not pass. Times are seconds; `resident_mib` is the memory held at
the end.
"""

import argparse
import csv
import gc
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from bench.foreign_bugs import DTYPES as DTYPES_OF_FOREIGN
from bench.foreign_bugs import Drawn, drawn_cases
from shardproof.harness.dense_model import SUBJECT
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.engines.threads.rank_threads import resident_bytes
from shardproof.harness.errors import RequestError, ShardproofError
from shardproof.harness.interpreter import COLLECTED_AFTER
from shardproof.harness.running.proof import prove
from shardproof.harness.subject import resolve_subject
from shardproof.harness.verdicts.verdict import UNKNOWN
from shardproof.reference.case import Case
from shardproof.reference.features import PARTS
from shardproof.suites.drawing.profiles import draw_samples
from shardproof.suites.drawing.strategies import every_word, large_cases, modes_with
from shardproof.suites.session.request import chosen_modes

DTYPES = ("any", "float64", "float32", "bfloat16", "float16")
LARGE = 5
"""One case in this many has a size that users train."""
UNJUDGED = "unjudged"
"""The verdict of a case whose dense model diverges."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A share of the cases to draw: `number` of `parts` draws its share of `cases` in every mode.

    With `dtype` "any" and `steps` 0 these are drawn too. Every case has the parts in `needs`. A case that takes longer
    than `timeout_s` counts as an alarm. With `foreign` the cases are those of the subjects in `bench.foreign`.
    """

    subject: str = SUBJECT
    dtype: str = "any"
    needs: tuple[str, ...] = ()
    cases: int = 120
    number: int = 1
    parts: int = 1
    first_seed: int = 0
    steps: int = 0
    timeout_s: float = 300.0
    foreign: bool = False

    def draw_cases(self) -> list[Drawn]:
        """Every case of this part with its subject; modes, or foreign subjects, take turns."""
        if self.foreign:
            share = self.cases // self.parts + (self.number <= self.cases % self.parts)
            return drawn_cases(share, self.first_seed * 1000 + self.number, dtype=self.dtype)
        of_modes = [cases_of(mode, share, self) for mode, share in self.shares().items()]
        subject = resolve_subject(self.subject)
        return [Drawn(subject, case) for turn in zip_longest(*of_modes) for case in turn if case]

    def shares(self) -> dict[str, int]:
        """Mode -> how many cases of it this part proves; the shares of all parts and modes add up to `cases`."""
        can = modes_with(*self.needs)
        modes = [mode for mode in chosen_modes(self.subject, "all") if mode in can]
        slots = [(mode, number) for number in range(1, self.parts + 1) for mode in modes]
        whole, rest = divmod(self.cases, len(slots))
        return {mode: whole + (place < rest) for place, (mode, number) in enumerate(slots) if number == self.number}


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A verdict on a right subject that is no pass: an alarm, or undecided."""

    subject: str
    case: str
    check: str
    verdict: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """The counts of a part: judged `cases`, cases that the subject `refused`, and those whose dense model diverges.

    The latter are `unjudged`. `alarms` and `undecided` count verdicts.
    """

    dtype: str
    cases: int
    refused: int
    unjudged: int
    alarms: int
    undecided: int
    seconds: float
    resident_mib: int = 0


def campaign(part: Part) -> Iterator[tuple[Campaign, list[Alarm]]]:
    """Prove the cases of a part. Yields after each of them the counts so far, and its verdicts that did not pass."""
    start_s = time.perf_counter()
    refused = unjudged = alarms = undecided = 0
    with InprocEngine() as engine:
        for number, drawn in enumerate(part.draw_cases(), start=1):
            alarms_or_none = _alarms(drawn, part.timeout_s, engine)
            alarms_of_case = alarms_or_none or []
            lost = sum(one.verdict == UNJUDGED for one in alarms_of_case)
            unsure = sum(one.verdict == UNKNOWN and one.check != "run" for one in alarms_of_case)
            refused, unjudged = refused + (alarms_or_none is None), unjudged + lost
            alarms, undecided = alarms + len(alarms_of_case) - unsure - lost, undecided + unsure
            so_far = Campaign(
                dtype=part.dtype,
                cases=number - refused - unjudged,
                refused=refused,
                unjudged=unjudged,
                alarms=alarms,
                undecided=undecided,
                seconds=round(time.perf_counter() - start_s, 1),
                resident_mib=resident_bytes() // 2**20,
            )
            yield so_far, alarms_of_case


def cases_of(mode: str, share: int, part: Part) -> list[Case]:
    """`share` cases of this mode, the same ones for the same part. Cases of sizes that users train come last."""
    many = (share + part.number % LARGE) // LARGE  # over all parts together, one case in LARGE
    fixed: dict[str, Any] = {} if part.dtype == "any" else {"dtype": part.dtype}
    fixed |= {"steps": part.steps} if part.steps else {}
    fixed |= {"needs": part.needs} if part.needs else {}
    first_seed = part.first_seed * 1000 + part.number
    usual = draw_samples(every_word(mode, **fixed), share - many, first_seed)
    return usual + draw_samples(large_cases(mode, **fixed), many, first_seed)


def _alarms(drawn: Drawn, timeout_s: float, engine: InprocEngine) -> list[Alarm] | None:
    """Verdicts of one case that did not pass; None when the subject does not take it."""
    subject, case = drawn

    def alarm(check: str, verdict: str, message: str) -> Alarm:
        return Alarm(subject=subject.name, case=str(case), check=check, verdict=verdict, message=message)

    try:
        result = prove(case, subject, engine, timeout_s=timeout_s)
    except ShardproofError as error:
        diverges = isinstance(error, RequestError) and "the dense model diverges" in str(error)
        return [alarm("run", UNJUDGED if diverges else UNKNOWN, str(error))]
    if result.skipped:
        return None
    return [alarm(each.check, each.verdict, each.message) for each in result.verdicts if each.verdict != "pass"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one part and write what it came to. Exit status: 0 no alarm, 1 an alarm, 2 the request was wrong."""
    asked = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    try:
        part = _part(asked)
        so_far = _write_part(part, Path(asked.out))
    except RequestError as error:
        print(f"bench.clean: {error}", file=sys.stderr)
        return error.exit_status
    summary = f"{so_far.cases} cases in {so_far.dtype} dtype, {so_far.alarms} false alarms"
    summary += f", {so_far.undecided} verdicts undecided, {so_far.unjudged} cases not judged (the dense model diverges)"
    print(f"{summary}, {so_far.seconds:.0f} s, {so_far.resident_mib} MiB")
    return 1 if so_far.alarms else 0


def _write_part(part: Part, out: Path) -> Campaign:
    """Run the part; its row and its alarms are on disk after every case."""
    out.mkdir(parents=True, exist_ok=True)
    kind = ["foreign"] if part.foreign else []
    stem = "-".join([*kind, part.dtype, *part.needs, f"{part.number}-of-{part.parts}"])
    so_far = Campaign(dtype=part.dtype, cases=0, refused=0, unjudged=0, alarms=0, undecided=0, seconds=0.0)
    with Progress(transient=True) as progress, (out / f"alarms-{stem}.jsonl").open("w") as alarms:
        task = progress.add_task(f"{part.dtype}, part {part.number} of {part.parts}", total=part.cases // part.parts)
        for so_far, found in campaign(part):
            alarms.writelines(json.dumps(asdict(alarm)) + "\n" for alarm in found)
            alarms.flush()
            with (out / f"clean-{stem}.csv").open("w", newline="") as table:
                rows = csv.writer(table)
                rows.writerow([field.name for field in fields(Campaign)])
                rows.writerow(astuple(so_far))
            progress.update(task, completed=so_far.cases + so_far.refused + so_far.unjudged)
    return so_far


def _part(asked: argparse.Namespace) -> Part:
    number, _, parts = asked.part.partition("/")
    if not (number.isdecimal() and parts.isdecimal() and 1 <= int(number) <= int(parts)):
        raise RequestError(f"part={asked.part}: must be a number of how many, from 1; legal: --part 1/2")
    counts = (("cases", asked.cases, 1, 120), ("steps", asked.steps, 0, 2), ("foreign", asked.foreign, 0, 500))
    for word, count, least, legal in counts:
        if count < least:
            raise RequestError(f"{word}={count}: must be at least {least}; legal: --{word} {legal}")
    if asked.foreign and (asked.needs or asked.steps or asked.dtype not in ("any", *DTYPES_OF_FOREIGN)):
        rule = "its subjects have words of their own, and are drawn in any dtype or one of these"
        raise RequestError(f"foreign={asked.foreign}: {rule}; legal: --dtype {'|'.join(DTYPES_OF_FOREIGN)}")
    words = {word: getattr(asked, word) for word in ("subject", "dtype", "cases", "first_seed", "steps", "timeout_s")}
    words |= {"foreign": True, "cases": asked.foreign} if asked.foreign else {}
    return Part(**words, needs=tuple(asked.needs), number=int(number), parts=int(parts))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.clean", description="Count false alarms on a right subject.")
    parser.add_argument("--subject", default=SUBJECT, metavar="M:O", help=f"a right implementation ({SUBJECT})")
    foreign = "draw this many cases of the subjects in bench.foreign instead (0)"
    parser.add_argument("--foreign", type=int, default=0, metavar="N", help=foreign)
    parser.add_argument("--cases", type=int, default=120, metavar="N", help="cases of all parts together (120)")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="dtype of every case, drawn when any (any)")
    parser.add_argument(
        "--with", dest="needs", action="append", default=[], choices=[*PARTS], help="a part that every case has"
    )
    parser.add_argument("--steps", type=int, default=0, metavar="N", help="steps of every case, drawn when 0 (0)")
    parser.add_argument(
        "--part", default="1/1", metavar="I/N", help="which of how many shares this process takes (1/1)"
    )
    seconds = "seconds a case may take (300)"
    parser.add_argument("--timeout", dest="timeout_s", type=float, default=300.0, metavar="S", help=seconds)
    seeds = "other seeds draw other cases (0)"
    parser.add_argument("--seed", dest="first_seed", type=int, default=0, metavar="N", help=seeds)
    parser.add_argument("--out", default="runs/clean", metavar="DIR", help="where the tables go (runs/clean)")
    return parser


if __name__ == "__main__":
    gc.freeze()  # what is loaded by now stays, so garbage collection need not look through it
    gc.set_threshold(*COLLECTED_AFTER)
    sys.exit(main())
