"""Do two commits give the same results? Outcomes, ledgers and verdicts of the default run and of drawn cases.

    python -m bench.same_results BASE [--cases 200] [--seed 0] [--work DIR]

BASE (a checkout of the other commit) and this tree run the same cases: BASE's default run and so many drawn ones.
Compared are the digest of every outcome of every rank, bit for bit; every row of the ledger without `caller` and times;
verdict and unchecked names of every check. Messages may differ; the errors behind a verdict are compared and counted
apart. Exit status: 0 equal, 1 not.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from hypothesis import HealthCheck, Phase, given, seed, settings

from harness.ledger import REPEATABLE
from reference.language.modes import MODES
from suites.drawing.strategies import every_word

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What one commit made of the cases."""

    outcomes: dict[tuple[str, int], Counter[str]]
    ledger: pd.DataFrame
    verdicts: dict[tuple[str, str], tuple[str, str]]
    errors: dict[tuple[str, str], str]


def drawn(count: int, first_seed: int) -> list[str]:
    """So many legal cases in any word, as texts; the same for the same seed."""
    texts: list[str] = []
    for place, mode in enumerate(MODES):
        share = count // len(MODES) + (place < count % len(MODES))

        @seed(first_seed)
        @settings(
            max_examples=max(share, 1),
            database=None,
            deadline=None,
            phases=(Phase.generate,),
            suppress_health_check=tuple(HealthCheck),
        )
        @given(case=every_word(mode))
        def draw(case: object) -> None:
            texts.append(str(case))

        if share:
            draw()
    return list(dict.fromkeys(texts))


def results(tree: Path, texts: list[str], work: Path) -> Results:
    """Run these cases (none: the default run) on the code of that tree.

    Raises SystemExit when no run folder was written.
    """
    work.mkdir(parents=True, exist_ok=True)
    digests = work / "digests.jsonl"
    digests.write_text("")
    # The tree's rooms come first; `bench` is this one's, since BASE may have none.
    link = work / "probe"
    link.mkdir(exist_ok=True)
    (link / "digested.py").write_text((ROOT / "bench/digested.py").read_text())
    environment = os.environ | {
        "PYTHONPATH": f"{tree}{os.pathsep}{link}",
        "DIGESTS": str(digests),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-m",
        "reports.commands.cli",
        "run",
        "--subject",
        "digested:subject",
        "--out",
        str(work / "runs"),
    ]
    ended = subprocess.run([*command, *texts], cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if not (work / "runs/latest").exists():
        raise SystemExit(f"{tree}: no run folder; exit {ended.returncode}\n{ended.stdout}\n{ended.stderr}")
    return read(work)


def read(work: Path) -> Results:
    """What `results` wrote."""
    outcomes: dict[tuple[str, int], Counter[str]] = {}
    for line in (work / "digests.jsonl").read_text().splitlines():
        case, rank, digest = json.loads(line)
        outcomes.setdefault((case, rank), Counter())[digest] += 1
    verdicts: dict[tuple[str, str], tuple[str, str]] = {}
    errors: dict[tuple[str, str], str] = {}
    for line in (work / "runs/latest/verdicts.jsonl").read_text().splitlines():
        row = json.loads(line)
        key = row["case"], row["check"]
        verdicts[key] = row["verdict"], json.dumps(row["unchecked"])
        errors[key] = json.dumps(row["worst"])
    ledger = pd.read_csv(work / "runs/latest/ledger.csv", dtype=str, keep_default_na=False)
    return Results(outcomes=outcomes, ledger=ledger, verdicts=verdicts, errors=errors)


def differences(base: Results, ours: Results) -> list[str]:
    """One line for each thing that is not equal; how often an outcome was computed does not count."""
    found = [
        f"outcome of rank {rank}: {case}"
        for case, rank in sorted(base.outcomes.keys() | ours.outcomes.keys())
        if set(base.outcomes.get((case, rank), ())) != set(ours.outcomes.get((case, rank), ()))
    ]
    for key in sorted(base.verdicts.keys() | ours.verdicts.keys()):
        one, other = base.verdicts.get(key), ours.verdicts.get(key)
        if one != other:
            found.append(f"verdict of {key[1]}: {one} and {other}: {key[0]}")
    kept = list(REPEATABLE)
    order = ["case", "rank", "call_index"]
    first, second = (side.ledger[kept].sort_values(order, ignore_index=True) for side in (base, ours))
    for case in sorted(set(first["case"]) | set(second["case"])):
        one, other = (side[side["case"] == case].reset_index(drop=True) for side in (first, second))
        if not one.equals(other):
            found.append(f"ledger: {len(one)} and {len(other)} rows: {case}")
    return found


def main() -> int:
    """Compare, print one line a difference, and the counts."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.same_results", description="Compare the results of two commits."
    )
    parser.add_argument("base", help="a checkout of the commit to compare with (git worktree add)")
    parser.add_argument("--cases", type=int, default=200, metavar="N", help="drawn cases (200)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="other seeds draw other cases (0)")
    parser.add_argument("--work", default="runs/same", metavar="DIR", help="where both run folders go (runs/same)")
    options = parser.parse_args()
    base, work, failed = Path(options.base).resolve(), Path(options.work).resolve(), 0
    default = results(base, [], work / "base-default")
    texts = {
        "default": list(dict.fromkeys(case for case, _ in default.outcomes)),
        "drawn": drawn(options.cases, options.seed),
    }
    for name, cases in texts.items():
        one = results(base, cases, work / f"base-{name}")
        other = results(ROOT, cases, work / f"ours-{name}")
        found = differences(one, other)
        print(*found, sep="\n")
        errors = sum(one.errors.get(key) != other.errors.get(key) for key in one.errors)
        print(
            f"{name}: {len(cases)} cases, {len(one.outcomes)} outcomes, {len(one.ledger)} events,"
            f" {len(one.verdicts)} verdicts:"
            f" {len(found)} differences; {errors} errors behind verdicts differ in some bit"
        )
        failed += len(found)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
