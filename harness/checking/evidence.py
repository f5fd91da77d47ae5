"""Evidence and findings: what checks look at, and what they answer.

A check is a pure function from `Evidence` to a `Finding`. Errors are ratios; `epsilons` count them in the machine
epsilon of the case's dtype.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from shardproof.harness.checking.measures.measured import Measured, epsilon
from shardproof.harness.engines.engine import Unwaited
from shardproof.harness.ledger import Event
from shardproof.harness.outcome.merging import Flaw, Merged, Outcomes, against, merge
from shardproof.harness.protocols import Axes, CaseLike, TermLike
from shardproof.harness.verdicts.facts import Counts, Note, Worst

if TYPE_CHECKING:
    from shardproof.harness.checking.measures.stated_deviations import Deviations
    from shardproof.harness.checking.measures.tolerance import Controlled
    from shardproof.harness.recording.spans import RankSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class Regrouped:
    """A run of the same global batch with these `sizes` of dp, micro, ...: its merged `tensors`.

    `flaws` are of tensors that make no full one; `problem` is why the subject did not finish it.
    """

    sizes: Mapping[str, int]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    flaws: tuple[Flaw, ...] = ()
    problem: str = ""

    @property
    def words(self) -> str:
        """The grouping as words of a case."""
        return " ".join(f"{word}={size}" for word, size in self.sizes.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """The first module that differs from the truth's, found without a declared layout: a place, never a verdict.

    `phase` is "forward" or "backward", `module` its path ("" is the model itself), `words` how it shows. `summed` is
    the axis over which its tensors are partial sums. Else `shown` are the wrong tensor and the truth's, one pair for
    each layout that its shape allows.
    """

    phase: str
    module: str
    words: str
    summed: str = ""
    shown: tuple[tuple[Tensor, Tensor], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskDraws:
    """Masks of dropout that were recorded as torch drew them: rates by name.

    `anew` are those drawn in backward, as the user's line and the rank: recomputation that does not repeat its forward.
    """

    rates: Mapping[str, float]
    anew: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that is known of one case after its runs.

    outcomes     by rank, what the subject returned in the recorded run
    captured     by rank, activations, their gradients and dropout masks captured from outside; empty when none were
    merged       the full tensors and flaws of both, held against the truth's shapes
    truth        name -> full tensor of the dense model
    initial      parameter -> its value before the first step, as the dense model has it; empty where that is not known
    controls     the same from control runs in the run dtype; for float64 only where an error is beyond the limit
    amplified    the same from control runs with CONTROL_FACTOR times as much rounding; empty until an error needs them
    far          name -> how far control runs are from the truth, of tensors so large that they are not kept
    slack        name -> how far every element may be off because Adam follows rounding; empty for other optimizers
    states       the subject's own states from which the steps of truth and controls began, by name; None when every
                 step of theirs began where their own last one ended
    kinks        name -> what a relu within rounding of zero may change; empty until an error needs it
    events       the ledger of the recorded run, all ranks
    expectation  the closed form, None when the subject has none
    unwaited     asynchronous calls of the recorded run that were never waited for
    repeats      outcomes of further runs that nothing recorded
    saved_bytes  by rank, the most that autograd held for backward; empty when not measured
    ran          the ranks that were run, in the order of `saved_bytes`; empty when it was all of them
    notes        what else is to be reported of the runs
    hidden       (rank, call index) of calls that were waited for only after a product; None when not measured
    orders       rank lists that the subject states for axes of its own rank order; empty when it states none
    unread       rows of tables that the data of the case never look up, in words of the reference
    declared     patterns of names that the subject leaves out on purpose
    shares       what a diagnosis computed with the dense model (see DenseModelLike.shares); empty until then
    beyond       names that are beyond the limits of the case's dtype: `controls` and `amplified` have them as far from
                 the truth as the ranks' lower precision moves them
    lowest       the lowest dtype of that precision; "" where nothing is judged by it
    island       where a lower precision enters on several ranks alone, if it explains what is wrong; "" otherwise
    drawn        numbers that ranks drew in forward and the truth did not, in words; "" where there are none
    other_samples  how the samples of the ranks differ from those of the truth, in words; "" where they do not
    other_start  a parameter that a rank begins with other values than the truth, in words; "" where none is known
    unsummed     by rank, the sum of squares of its gradients after each that backward added to, before sums over ranks
    deviates     how the subject states that tensors deviate from the truth; None where it does not
    given        names of what the truth was given of the outcome: it does not check them; empty where it knows all
    deviations   standard deviations of initial values by parameter, as the reference states them; 0 is a constant
    mask_draws   what is known of masks that were recorded; None where the subject returned them, or there are none
    torn         whether there is no truth, since tensors of the ranks that it needs do not merge
    regrouped    merged outcomes of the same global batch in other groupings; empty when none was run
    others       evidence of the same subject in cases that differ in one size, where a diagnosis needs them
    spans        when the ranks of a pipeline computed; empty where ranks took turns
    first_forward  the tensor of the dense model's first forward that is furthest off in float32; None where that was
                 not looked at (harness.running.trials.law_runs)
    of_dtype     the operator by which the dense model is another function in every dtype, in words; then the truth is
                 that in the case's dtype. "" where there is none
    located      the first wrong module, when a diagnosis looked for it without a declared layout
    earlier      evidence and findings of the same case ended before the first wrong step, where states after a step
                 were not returned; None where that run was not needed or could not be made

    From these follow, when it is made:

    ranks        the ranks that were run
    axes         axis -> the rank lists of its groups: the case's, or the subject's own where it states them
    returned     every name that any rank returned or from which it was captured
    dtype        the case's
    """

    case: CaseLike
    merged: Merged
    outcomes: Outcomes = ()
    captured: Outcomes = ()
    truth: Mapping[str, Tensor] = field(default_factory=dict)
    initial: Mapping[str, Tensor] = field(default_factory=dict)
    controls: tuple[Mapping[str, Tensor], ...] = ()
    amplified: tuple[Mapping[str, Tensor], ...] = ()
    events: tuple[Event, ...] = ()
    expectation: tuple[TermLike, ...] | None = None
    repeats: tuple[Outcomes, ...] = ()
    far: "Mapping[str, Controlled]" = field(default_factory=dict)
    kinks: tuple[Mapping[str, Tensor], ...] = ()
    slack: Mapping[str, Tensor] = field(default_factory=dict)
    states: Mapping[str, Tensor] | None = None
    unwaited: tuple[Unwaited, ...] = ()
    saved_bytes: tuple[int, ...] = ()
    ran: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    hidden: frozenset[tuple[int, int]] | None = None
    orders: Axes = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    declared: tuple[str, ...] = ()
    shares: Mapping[str, Tensor] = field(default_factory=dict)
    beyond: frozenset[str] = frozenset()
    lowest: str = ""
    island: str = ""
    drawn: str = ""
    other_samples: str = ""
    other_start: str = ""
    unsummed: tuple[Tensor, ...] = ()
    deviates: "Deviations | None" = None
    given: tuple[str, ...] = ()
    deviations: Mapping[str, float] = field(default_factory=dict)
    mask_draws: MaskDraws | None = None
    torn: bool = False
    regrouped: tuple[Regrouped, ...] = ()
    others: "tuple[Evidence, ...]" = ()
    spans: "tuple[RankSpan, ...]" = ()
    first_forward: Measured | None = None
    of_dtype: str = ""
    located: Located | None = None
    earlier: "tuple[Evidence, Mapping[str, Finding]] | None" = None
    ranks: tuple[int, ...] = field(init=False, repr=False)
    axes: Axes = field(init=False, repr=False)
    returned: frozenset[str] = field(init=False, repr=False)
    dtype: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", self.ran or tuple(range(len(self.outcomes))))
        object.__setattr__(self, "axes", {**self.case.axes, **self.orders})
        object.__setattr__(self, "returned", frozenset().union(*self.outcomes, *self.captured))
        object.__setattr__(self, "dtype", self.case.dtype)

    @property
    def full_outcomes(self) -> Outcomes:
        """By rank, what was returned and what was captured beside it."""
        outside = self.captured or [{}] * len(self.outcomes)
        return tuple({**a, **b} for a, b in zip(outside, self.outcomes, strict=True))

    def dtype_of(self, name: str) -> str:
        """The lowest dtype whose rounding is in this tensor, as far as that was looked for."""
        return self.lowest if self.lowest and name in self.beyond else self.case.dtype


def apart_by(evidence: Evidence, name: str, spread: float) -> Worst:
    """The figures of a tensor whose replicas, or values in two runs, are apart by this ratio: nothing is allowed."""
    return Worst(name=name, error=spread, allowed=0.0, epsilons=spread / epsilon(evidence.dtype_of(name)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Finding of one check: the answer, one sentence, and what it could not look at (`notes`).

    `names` are those of wrong tensors, the one in question first. `worst` is the tensor or event closest to its limit
    or furthest beyond it; None where nothing is measured.
    `kind`: how calls differ ("missing"), "" where no calls are compared.
    `decided`: kind of name ("grad") -> how many tensors were found right or wrong, and of how many. `wrong` are the
    tensors beyond their limit; `phase` and `region` are the place where the check knows it. `ranks` are the
    ranks that are wrong, empty when it is all of them or unknown.
    """

    verdict: str
    message: str
    worst: Worst | None = None
    notes: tuple[Note, ...] = ()
    wrong: tuple[Measured, ...] = ()
    names: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    phase: str = ""
    region: str = ""
    kind: str = ""
    decided: Mapping[str, Counts] = field(default_factory=dict)


def merged_outcomes(
    outcomes: Outcomes, captured: Outcomes, truth: Mapping[str, Tensor], known: Mapping[str, Tensor] | None = None
) -> Merged:
    """The full tensors of what the ranks returned and what was captured from them; a returned name comes first.

    `known`: full tensors that the same outcomes gave before, which are not merged again.
    """
    both = [{**from_outside, **mine} for mine, from_outside in zip(outcomes, captured, strict=False)]
    outside = frozenset[str]().union(*captured)
    kept = {name: tensor for name, tensor in (known or {}).items() if name not in outside}
    return against(merge(both or outcomes, kept), truth)
