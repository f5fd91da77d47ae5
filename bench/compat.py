"""`make compat`: shardproof under every release of torch that it names, each in an environment of its own.

    python3 -m bench.compat [--only 3.12:2.14] [--keep]

Needs no installed package. An environment is made in .compat/, used and deleted (each holds up to 6 GB; --keep keeps
them, and uses those that are there). Prints one line a step: python, torch, step, result, seconds, and of a failed step
the end of its output. Exit status 1 when a step failed or nothing could be run; an interpreter that is not on PATH is
`not run`. Every step is bounded in time.
"""

import argparse
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.environments import ROOT, ended, install

PLACE = ROOT / ".compat"
MATRIX = (
    *(("3.12", torch) for torch in ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")),
    ("3.11", "2.13.0"),
    ("3.13", "2.14.1"),
)
"""Python and torch."""
_CASES = (
    *("mode=tp tp=2", "mode=tp-sp tp=2", "preset=tiny-internlm2 mode=isp tp=2", "mode=tp tp=2 dp=2 zero=2"),
    *("mode=tp-sp tp=1 cp=2 seq=32", "mode=tp tp=1 pp=2 micro=3"),
)
_PROGRAM = str(ROOT / "tests" / "harness" / "programs" / "scripts" / "fsdp2.py")
_TESTS = (
    "tests/harness/shapes/test_torch_internals.py",
    "tests/harness/shapes/test_unmapped.py",
    "tests/harness/threads/test_inproc_calls.py",
)
PASSED, FAILED, NOT_RUN = "pass", "FAIL", "not run"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the matrix."""
    parser = argparse.ArgumentParser(prog="bench.compat", description="shardproof under every tested torch")
    parser.add_argument("--only", default="", help="rows whose PYTHON:TORCH begins so, such as 3.12:2.14")
    parser.add_argument("--keep", action="store_true", help="keep the environments in .compat/, and use kept ones")
    asked = parser.parse_args(arguments)
    chosen = [pair for pair in MATRIX if ":".join(pair).startswith(asked.only)]
    if not chosen:
        legal = " ".join(":".join(pair) for pair in MATRIX)
        print(f"--only {asked.only}: no row begins so; legal: {legal}", file=sys.stderr)
        return 2
    results = set()
    for python, torch in chosen:
        for step, result, seconds, why in proved(python, torch, keep=asked.keep):
            print(f"{python} torch {torch} {step}: {result} {seconds:.0f} s{why and f': {why}'}", flush=True)
            results.add(result)
    return 1 if FAILED in results or results == {NOT_RUN} else 0


def proved(python: str, torch: str, *, keep: bool) -> Iterator[tuple[str, str, float, str]]:
    """The steps of one environment: name, result, seconds, and why it did not pass. Without an environment one step."""
    if not (path := shutil.which(f"python{python}")):
        yield "all", NOT_RUN, 0.0, f"no python{python} on PATH"
        return
    place = PLACE / f"py{python}-torch{torch}"
    try:
        for step, *commands in _steps(path, torch, place, made=keep and (place / "ready").exists()):
            began_s = time.monotonic()
            why = next(filter(None, (ended(one, folder=ROOT if "pytest" in one else PLACE) for one in commands)), "")
            yield step, FAILED if why else PASSED, time.monotonic() - began_s, why
            if step == "install" and why:
                return
            (place / "ready").touch()
    finally:
        if not keep:
            shutil.rmtree(place, ignore_errors=True)


def _steps(python: str, torch: str, place: Path, *, made: bool) -> Iterator[tuple[str, *tuple[list[str], ...]]]:
    """Name and commands of every step. Installed are this torch, all other pins of constraints.txt, this checkout."""
    shardproof, own = str(place / "bin" / "shardproof"), str(place / "bin" / "python")
    if not made:
        yield "install", *install(python, place, [f"torch=={torch}"])
    launch = [own, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2", "--master-port", "29611"]
    yield "run", [shardproof, "run"]
    yield "run --engine pool", [shardproof, "run", "--engine", "pool", *_CASES]
    yield "run --engine dry", [shardproof, "run", "--engine", "dry", *_CASES]
    yield "run --engine torchrun", [*launch, "-m", "shardproof", "run", "--engine", "torchrun", _CASES[0]]
    yield "record", [*launch, "-m", "shardproof.record", _PROGRAM]
    yield "tests of the internals", [own, "-m", "pytest", "-q", "-p", "no:cacheprovider", *_TESTS]


if __name__ == "__main__":
    sys.exit(main())
