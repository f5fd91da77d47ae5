"""What is known of two launches while they are judged: partners, axes, tensors by name, control runs.

The first launch is the truth; the ranks of the second one are checked.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from shardproof.harness.checking.checks import Check, run_checks
from shardproof.harness.checking.coverage import check_layout, check_replicas
from shardproof.harness.checking.finding import Finding
from shardproof.harness.checking.measures.kinds import kind_of, step_of
from shardproof.harness.checking.numeric_checks import check_update, make_numeric_check
from shardproof.harness.checking.records import Calls, Claims, Controls, Evidence, RecordedRun, Truth, merged_outcomes
from shardproof.harness.parity.adam import adam_bound
from shardproof.harness.parity.axes import axes_of
from shardproof.harness.parity.modules import Compared
from shardproof.harness.parity.partners import Partners, find_partners
from shardproof.harness.parity.quantities import (
    Reading,
    control_tensors,
    flat_parameters,
    full_tensors,
    is_clipped,
    outcomes_of,
    with_flat,
)
from shardproof.harness.parity.recorded import Launch
from shardproof.harness.parity.samples import Samples, samples_of
from shardproof.harness.protocols import Axes
from shardproof.harness.verdicts.verdict import FAIL

NAME = "parity"
"""The name of the run, and the first word of its case."""
NUMERIC = ("initial_values", "forward", "parameter_gradients", "gradient_norm", "update")
CHECKS: Mapping[str, Check] = {
    "merge": check_layout,
    "replicas": check_replicas,
    **{name: make_numeric_check(name) for name in NUMERIC},
    "update": check_update,
}
"""Checks of layouts first, then of numbers in the order in which training computes them."""
LISTED = 5
"""The most names that a message lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityCase:
    """The second launch, in the words that checks and diagnosis read of every case. `axes` are those of the second one;
    every step is compared as one batch, so `micro` is 1.
    """

    name: str
    world_size: int
    axes: Axes
    steps: int
    dtype: str
    micro: int = 1
    seed: int = 0

    @property
    def mode(self) -> str:
        """The axes of more than one rank: "dp+tp", "one"."""
        return "+".join(sorted(self.axes)) or "one"

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Axis -> ranks in each of its groups."""
        return {axis: len(groups[0]) for axis, groups in self.axes.items()}

    def but(self, **words: Any) -> "ParityCase":
        """This case with some words changed."""
        return replace(self, **words)

    def __str__(self) -> str:
        sizes = " ".join(f"{axis}={size}" for axis, size in self.axis_sizes.items())
        return " ".join(filter(None, (self.name, sizes, f"steps={self.steps}", f"dtype={self.dtype}")))


@dataclass(slots=True, kw_only=True)
class LaunchComparison:
    """What is known of two launches while they are judged."""

    first: Launch
    second: Launch
    partners: Partners
    axes: Mapping[str, tuple[tuple[int, ...], ...]]
    case: ParityCase
    steps: list[Samples]
    tensors: Mapping[str, Tensor]
    flat: Mapping[str, bool]
    lost: tuple[str, ...]
    reading: Reading
    controls: list[Launch] = field(default_factory=list)
    control_tensors: list[dict[str, Tensor]] = field(default_factory=list)

    @property
    def without_partner(self) -> list[str]:
        """The parameters of the first launch that no rank of the second one holds."""
        placed = {name for placement in self.partners.placements.values() for name in placement.names}
        names = (name.removeprefix("init/") for name in self.tensors if name.startswith("init/"))
        return [name for name in names if name not in placed]


def compare_modules(seen: LaunchComparison, step: int = 0) -> Compared:
    """Both launches in a step, for comparing modules and their gradients."""
    return Compared(
        first=seen.first.from_step(step) if step else seen.first,
        second=seen.second.from_step(step) if step else seen.second,
        partners=seen.partners,
        samples=seen.steps[step],
        axes=seen.axes,
        dtype=seen.case.dtype,
        controls=() if step else seen.controls,
    )


def prepare_comparison(first: Launch, second: Launch) -> LaunchComparison:
    """Both launches, as far as their recordings show how they belong together."""
    count = min(first.steps, second.steps)
    found = [samples_of(first, second, step) for step in range(count)]
    axes = axes_of(second, found[0]) if found else {}
    # A program that clips by hand shows gradients only after clipping.
    reading = Reading(received=is_clipped(first) != is_clipped(second))
    tensors, flaws = full_tensors(first, reading)
    initial = {n.removeprefix("init/"): tensor for n, tensor in tensors.items() if n.startswith("init/")}
    partners = find_partners(initial, first.aliases, second)
    flat = flat_parameters(second, partners, initial)
    case = ParityCase(name=NAME, world_size=second.world_size, axes=axes, steps=max(count, 1), dtype=first.dtype)
    return LaunchComparison(
        first=first,
        second=second,
        partners=partners,
        axes=axes,
        case=case,
        steps=found,
        tensors=with_flat({n: tensor for n, tensor in tensors.items() if step_of(n) < count}, flat),
        flat=flat,
        lost=tuple(flaw.name for flaw in flaws),
        reading=reading,
    )


def comparison_from(seen: LaunchComparison, step: int) -> LaunchComparison:
    """The same launches from a step on, with the partners and axes that are known of them."""
    first, second = seen.first.from_step(step), seen.second.from_step(step)
    tensors, flaws = full_tensors(first, seen.reading)
    later = replace(
        seen,
        first=first,
        second=second,
        case=replace(seen.case, steps=seen.case.steps - step),
        steps=seen.steps[step:],
        tensors=with_flat({n: t for n, t in tensors.items() if step_of(n) < seen.case.steps - step}, seen.flat),
        lost=tuple(flaw.name for flaw in flaws),
        controls=[],
        control_tensors=[],
    )
    for launch in seen.controls:
        add_control(later, launch.from_step(step))
    return later


def judge_numbers(seen: LaunchComparison, assumed: float = 0.0) -> tuple[Evidence, dict[str, Finding]]:
    """The evidence, and what the checks of numbers find in it; `assumed` is that of `adam_bound`."""
    outcomes = outcomes_of(seen.second, seen.partners, seen.axes, seen.reading)
    known = {name for outcome in outcomes for name in outcome}
    outcomes = [{name: own for name, own in outcome.items() if name in seen.tensors} for outcome in outcomes]
    merged = merged_outcomes(outcomes, (), seen.tensors)
    initial = {name.removeprefix("init/"): t for name, t in seen.tensors.items() if name.startswith("init/")}
    truth = Truth(
        tensors={name: tensor for name, tensor in seen.tensors.items() if name in known},
        initial=initial,
        controls=Controls(
            runs=tuple(seen.control_tensors),
            adam_bound=adam_bound(seen.tensors, initial, seen.control_tensors, assumed),
        ),
    )
    run = RecordedRun(calls=Calls(case=seen.case), outcomes=outcomes, merged=merged)
    evidence = Evidence(run=run, claims=Claims(axes=seen.axes), truth=truth)
    return evidence, run_checks(evidence, CHECKS)


def add_control(seen: LaunchComparison, launch: Launch) -> None:
    """Add a further run of the first launch to the control runs."""
    seen.controls.append(launch)
    seen.control_tensors.append(control_tensors(launch, seen.flat, seen.reading))


def wrong_starts(seen: LaunchComparison, findings: Mapping[str, Finding]) -> list[str]:
    """The parameters whose initial values differ from the first launch."""
    wrong = {name for finding in findings.values() if finding.verdict == FAIL for name in finding.names}
    return [name.removeprefix("init/") for name in seen.tensors if name in wrong and kind_of(name) == "init"]
