"""Do two commits give the same results? Outcomes, ledgers and verdicts of the default run and of drawn cases.

    python -m bench.same_results BASE [--cases 200] [--seed 0] [--work DIR]

BASE (a checkout of the other commit) and this tree run the same cases: BASE's default run and `--cases` drawn ones.
Compared are the outcomes of all ranks by their digests, and the verdicts of all checks with how many tensors they
decide. Ledgers are compared row by row without `caller` and times. Messages may differ; the errors behind verdicts are
compared and counted separately. Exit status: 0 equal, 1 not.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from shardproof.harness.ledger import REPEATABLE
from shardproof.reference.language.core import MODES
from shardproof.suites.drawing.profiles import draw_samples
from shardproof.suites.drawing.strategies import every_word

ROOT = Path(__file__).resolve().parents[1]
_KEYS = {"outcome": ["case", "rank"], "verdict": ["case", "check"], "ledger": ["case"]}
"""Columns that name a difference."""
Results = Mapping[str, pd.DataFrame]
"""The results of one commit: the tables of _KEYS, and `error`, the errors behind its verdicts."""


def draw_cases(count: int, first_seed: int) -> list[str]:
    """The texts of `count` legal cases in any word, each different one once; the same for the same seed."""
    shares = {mode: count // len(MODES) + (place < count % len(MODES)) for place, mode in enumerate(MODES)}
    cases = [case for mode, share in shares.items() for case in draw_samples(every_word(mode), share, first_seed)]
    return list(dict.fromkeys(map(str, cases)))


def results(tree: Path, texts: list[str], work: Path) -> Results:
    """Run these cases (none: the default run) on the code of that tree.

    Raises SystemExit when no run folder was written.
    """
    probe = work / "probe"
    probe.mkdir(parents=True, exist_ok=True)
    # That tree comes first; the probe is this tree's, since BASE may have none.
    (probe / "digested.py").write_text((ROOT / "bench/digested.py").read_text())
    (work / "digests.jsonl").write_text("")
    environment = os.environ | {
        "PYTHONPATH": f"{tree}{os.pathsep}{probe}",
        "DIGESTS": str(work / "digests.jsonl"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "shardproof", "run", "--subject", "digested:subject", "--out", str(work / "runs")]
    ended = subprocess.run([*command, *texts], cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if not (work / "runs/latest").exists():
        raise SystemExit(f"{tree}: no run folder; exit {ended.returncode}\n{ended.stdout}\n{ended.stderr}")
    return read_results(work)


def read_results(work: Path) -> Results:
    """The tables that `results` wrote. It does not matter how often an outcome was computed."""
    verdicts = pd.read_json(work / "runs/latest/verdicts.jsonl", lines=True, dtype=False)
    verdicts = verdicts[verdicts["verdict"].notna()].copy()  # later rows add to failures
    for column in ("decided", "worst"):  # a row may leave out what is empty
        verdicts[column] = verdicts[column].map(lambda entry: str(entry) if isinstance(entry, dict) and entry else "")
    (stored,) = (work / "runs/latest").glob("ledger.csv*")  # a large one is packed
    ledger = pd.read_csv(stored, dtype=str, keep_default_na=False)
    outcomes = pd.read_json(work / "digests.jsonl", lines=True, dtype=False)
    return {
        "outcome": outcomes.set_axis(["case", "rank", "digest"], axis=1).drop_duplicates(),
        "verdict": verdicts[["case", "check", "verdict", "decided"]],
        "ledger": ledger[list(REPEATABLE)],
        "error": verdicts[["case", "check", "worst"]],
    }


def differences(base: Results, ours: Results) -> list[str]:
    """Lines about outcomes, verdicts and ledgers that differ, one line for each."""
    return [
        f"{name} of {' '.join(map(str, place))}"
        for name, keys in _KEYS.items()
        for place in sorted(set(_apart(base[name], ours[name])[keys].itertuples(index=False, name=None)))
    ]


def _apart(one: pd.DataFrame, other: pd.DataFrame) -> pd.DataFrame:
    """The rows that only one of the two tables has."""
    both = one.merge(other, how="outer", indicator="side")
    return both[both["side"] != "both"]


def main() -> int:
    """Compare; print a line for each difference, and the counts."""
    about = "Compare the results of two commits."
    parser = argparse.ArgumentParser(prog="python -m bench.same_results", description=about)
    parser.add_argument("base", help="a checkout of the commit to compare with (git worktree add)")
    parser.add_argument("--cases", type=int, default=200, metavar="N", help="drawn cases (200)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="other seeds draw other cases (0)")
    parser.add_argument("--work", default="runs/same", metavar="DIR", help="where both run folders go (runs/same)")
    options = parser.parse_args()
    base, work, failed = Path(options.base).resolve(), Path(options.work).resolve(), 0
    default = results(base, [], work / "base-default")["outcome"]["case"]
    texts = {"default": list(dict.fromkeys(default)), "drawn": draw_cases(options.cases, options.seed)}
    for name, cases in texts.items():
        one, other = (results(tree, cases, work / f"{side}-{name}") for side, tree in (("base", base), ("ours", ROOT)))
        apart = differences(one, other)
        print(*apart, sep="\n")
        counts = ", ".join(f"{len(one[table])} rows of {table}" for table in _KEYS)
        errors = _apart(one["error"], other["error"])["check"].count() // 2
        summary = f"{len(apart)} differences; {errors} errors behind verdicts differ in some bit"
        print(f"{name}: {len(cases)} cases, {counts}: {summary}")
        failed += len(apart)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
