"""Pairs of real runs compared: equal ones, which must hold every limit, and ones with a phase that really takes longer.

    python -m tests.reports.comparing.slowed --pairs 20 --share 0.3 --out DIR

Runs the cases again and again. The second run of a pair is the same, or every rank does idle work in the backward of
one module so that this phase takes `share` longer than it took in the run before. Prints a line a pair and the counts.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from parallel.subject import subject as ours
from reference.case import Case
from reports.comparing.comparison import Comparison, compare
from reports.comparing.limits import limits
from reports.comparing.snapshot import Snapshot, side
from suites.session.prover import Prover

MODULE = "layers.1.mlp.w1"
CASES = ("mode=tp tp=2 layers=2 steps=60 lr=0.01",)
_LIMITS = ("events:0", "calls:0", "bytes:0", "time:10%")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowed:
    """Our subject; every backward of one module begins with so many microseconds of idle work, on every rank.

    The processor's microseconds: a busy machine stretches them as it does all other work.
    """

    wait_us: int
    module: str = MODULE
    modes: tuple[str, ...] = ours.modes

    def __call__(self, case: Case, device: torch.device) -> dict[str, Any]:
        """The outcome of ours. The hooks see the modules of all ranks of this process and heed their own."""
        rank, names = dist.get_rank(), dict[nn.Module, str]()

        def named(module: nn.Module, _: Any) -> None:
            if dist.get_rank() == rank and module not in names:
                names.update({part: name for name, part in module.named_modules()})

        def slow(module: nn.Module, _: Any, output: Any) -> None:
            if dist.get_rank() == rank and names[module] == self.module and isinstance(output, Tensor):
                output.register_hook(self._wait)

        hooks = register_module_forward_pre_hook(named), register_module_forward_hook(slow)
        try:
            return dict(ours(case, device))
        finally:
            for hook in hooks:
                hook.remove()

    def expected(self, case: Case) -> Any:
        """The closed form of ours: a wait sends nothing."""
        return ours.expected(case)

    def _wait(self, _: Tensor) -> None:
        end_s = time.thread_time() + self.wait_us / 1e6
        while time.thread_time() < end_s:
            pass


def __getattr__(name: str) -> Slowed:
    """`slowed_250` is the subject that waits 250 us."""
    word, _, number = name.partition("_")
    if word == "slowed" and number.isdecimal():
        return Slowed(wait_us=int(number))
    raise AttributeError(name)


def stored(out: Path, cases: tuple[str, ...], wait_us: int) -> tuple[Snapshot, float]:
    """A run of these cases, as one side of a comparison; and the share of a processor that it got.

    Only the ledger is checked: it is all that is compared.
    """
    start_s, start_busy_s = time.perf_counter(), time.process_time()
    with Prover.on(f"tests.reports.comparing.slowed:slowed_{wait_us}", "2", out=out) as prover:
        for case in cases:
            prover.holds(Case.parse(case), "ledger")
    return side(str(out / "latest")), (time.process_time() - start_busy_s) / (time.perf_counter() - start_s)


def wait_us(base: Snapshot, busy: float, share: float) -> int:
    """The work of every rank that makes the phase backward take so much longer: ranks that take turns work in turn."""
    backward = base.times[base.times["phase"] == "backward"]
    blocks = backward.groupby(["case", "step", "microbatch"])["elapsed_us"].sum()
    return round(share * busy * float(blocks.median()) / int(base.cases["world_size"].max()))


def _line(found: Comparison) -> str:
    spent = found.times[(found.times["phase"] == "backward") & (found.times["measure"] == "elapsed")]
    told = [f"{t['ratio']:.2f} [{t['low']:.2f}, {t['high']:.2f}] by the clock {t['clock_ratio']:.2f}"
            for t in spent.to_dict("records")]  # fmt: skip
    return f"{int(bool(found.breaches))} {'; '.join(told)} {' | '.join(found.breaches)}"


def main(arguments: list[str]) -> int:
    """Run, compare, count. The status is 1 when an equal pair breaks a limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--share", type=float, default=0.3)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("cases", nargs="*", default=CASES)
    asked = parser.parse_args(arguments)
    cases, alarms, named = tuple(asked.cases), 0, 0
    base, _ = stored(asked.out, cases, 0)
    for pair in range(asked.pairs):
        same, busy = stored(asked.out, cases, 0)
        found = compare(base, same, limits(_LIMITS))
        alarms += bool(found.breaches)
        print(f"{pair:3} equal  {_line(found)}", flush=True)
        if asked.share:
            work_us = wait_us(same, busy, asked.share)
            slow = compare(same, stored(asked.out, cases, work_us)[0], limits(_LIMITS))
            named += len(slow.breaches) == 1 and "backward: " in slow.breaches[0] and MODULE in slow.breaches[0]
            print(f"{pair:3} slowed {_line(slow)} ({work_us} us)", flush=True)
        base = same
    load = ", ".join(f"{part:.1f}" for part in os.getloadavg())
    print(f"{alarms} alarms in {asked.pairs} equal pairs, {named} of {asked.pairs} slowed ones named; load {load}")
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
