"""The records of a case, by lifetime: what the ranks left, what is true, what is claimed, what was searched.

    Calls         what the recorder saw of the ranks: the ledger, waits, bytes; a dry run has it too
    RecordedRun   what the ranks left: their calls, and every tensor that they returned or that was captured
    Repeats       what the ranks returned in runs that nothing recorded
    Truth         the tensors of the dense model, and how far rounding takes a right result from them
    Claims        what the subject states about the case
    Regroupings   the same global batch in other groupings
    Documents     whether documents of one step influence each other
    DryRun        what only a run without numbers can say
    Search        what was found to explain a failure; no check reads it

A check's signature names the records that it reads, and `checks.run_checks` passes them. `Evidence` has all of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shardproof.harness.checking.finding import Finding
from shardproof.harness.checking.measures.measured import Measured
from shardproof.harness.engines.engine import Unwaited
from shardproof.harness.ledger import Event
from shardproof.harness.outcome.blocks import Block
from shardproof.harness.outcome.merging import Flaw, Merged, Outcomes, match_truth, merge_outcomes
from shardproof.harness.protocols import Axes, CaseLike, TermLike
from shardproof.harness.verdicts.facts import Fact, Note

if TYPE_CHECKING:
    from shardproof.harness.checking.measures.stated_deviations import Deviations
    from shardproof.harness.checking.measures.tolerance import Controlled
    from shardproof.harness.recording.spans import RankSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """What the recorder saw of the ranks of a case.

    events       the ledger, all ranks
    unwaited     asynchronous calls that were never waited for
    saved_bytes  by rank, the most that autograd held for backward; empty when not measured
    hidden       (rank, call index) of calls that were waited for only after a matrix product; None when not measured
    spans        when the ranks of a pipeline computed; empty where ranks took turns
    ran          the ranks that were run, in the order of `saved_bytes`; empty when it was all of them
    packed       whether the subject states documents (shardproof.documents)
    """

    case: CaseLike
    events: tuple[Event, ...] = ()
    unwaited: tuple[Unwaited, ...] = ()
    saved_bytes: tuple[int, ...] = ()
    hidden: frozenset[tuple[int, int]] | None = None
    spans: "tuple[RankSpan, ...]" = ()
    ran: tuple[int, ...] = ()
    packed: bool = False

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that were run."""
        return self.ran or tuple(range(self.case.world_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskDraws:
    """Masks of dropout that were recorded as torch drew them: rates by name.

    `anew`: (line of the program, rank) of masks drawn in backward, by a recomputation that does not repeat its forward.
    """

    rates: Mapping[str, float]
    anew: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerPrecision:
    """The lowest dtype below the case's own in which the ranks compute or send, "" if there is none.

    `names` are the tensors that are judged by it, since they have its rounding.
    """

    dtype: str = ""
    names: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """What the ranks left in the recorded run.

    outcomes    by rank, what the subject returned
    captured    by rank, activations, their gradients and dropout masks captured from outside; empty when none were
    merged      the full tensors that both make, and the flaws of these, compared with the truth's shapes
    mask_draws  rates of masks that were recorded; None if the subject returned its masks, or there are none
    lower       the lower precision that was found in these tensors
    returned    every name that any rank returned, or under which something was captured from it
    """

    calls: Calls
    merged: Merged
    outcomes: Outcomes = ()
    captured: Outcomes = ()
    mask_draws: MaskDraws | None = None
    lower: LowerPrecision = LowerPrecision()
    returned: frozenset[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "returned", frozenset().union(*self.outcomes, *self.captured))

    @property
    def case(self) -> CaseLike:
        """The case that was run."""
        return self.calls.case

    @property
    def dtype(self) -> str:
        """The case's dtype."""
        return self.calls.case.dtype

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The full tensors by name."""
        return self.merged.tensors

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> "RecordedRun":
        """The same run with these full tensors."""
        return replace(self, merged=replace(self.merged, tensors=tensors))

    @property
    def full_outcomes(self) -> Outcomes:
        """By rank, what was returned and what was captured."""
        outside = self.captured or [{}] * len(self.outcomes)
        return tuple({**a, **b} for a, b in zip(outside, self.outcomes, strict=True))

    def dtype_of(self, name: str) -> str:
        """The dtype by whose rounding this tensor is judged."""
        return self.lower.dtype if self.lower.dtype and name in self.lower.names else self.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """Outcomes of further, unrecorded runs of the case; `problem` says why the machine could not finish them."""

    runs: tuple[Outcomes, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Controls:
    """How far rounding alone takes a right result from the truth, as runs of the dense model show it.

    runs        tensors of control runs in the run dtype; for float64 only where an error is beyond the limit
    amplified   the same with CONTROL_FACTOR times as much rounding; empty until an error needs them
    distances   name -> how far control runs are from the truth, for tensors that are too large to be kept
    adam_bound  name -> how far every element may be off because Adam follows rounding; empty for other optimizers
    relu_flips  for each side, name -> what a relu within rounding of zero may change; empty until an error needs it
    states      the subject's own states from which the steps of truth and controls began, by name; None if each step
                began where the one before had ended
    """

    runs: tuple[Mapping[str, Tensor], ...] = ()
    amplified: tuple[Mapping[str, Tensor], ...] = ()
    distances: "Mapping[str, Controlled]" = field(default_factory=dict)
    adam_bound: Mapping[str, Tensor] = field(default_factory=dict)
    relu_flips: tuple[Mapping[str, Tensor], ...] = ()
    states: Mapping[str, Tensor] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """The tensors of the dense model, and what is known about them.

    tensors        name -> full tensor
    initial        parameter -> its value before the first step; empty where that is not known
    controls       how far a right result may be from it
    of_dtype       the operator that makes the dense model another function in each dtype, in words, else "". If there
                   is one, `tensors` are those of the case's dtype
    first_forward  the tensor of the dense model's first forward that is furthest off in float32
                   (harness.running.trials.law_runs); None if that was not measured
    unread         rows of tables that the data of the case never look up, in words of the reference
    from_ranks     names of tensors of the outcome that the truth was given, and that are not checked
    unmergeable    whether there is no truth, since what it needs from the ranks does not merge or was not returned
    init_std       standard deviations of initial values by parameter, as the reference states them; 0 is a constant
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    initial: Mapping[str, Tensor] = field(default_factory=dict)
    controls: Controls = field(default_factory=Controls)
    of_dtype: str = ""
    first_forward: Measured | None = None
    unread: tuple[str, ...] = ()
    from_ranks: tuple[str, ...] = ()
    unmergeable: bool = False
    init_std: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """What the subject states about a case.

    axes               axis -> the rank lists of its groups: the subject's own if it states them, else the case's
    expectation        the closed form of the ledger, None when the subject has none
    declared           patterns of names that the subject leaves out on purpose
    known_differences  how tensors deviate from the truth by design, or None
    """

    axes: Axes
    expectation: tuple[TermLike, ...] | None = None
    declared: tuple[str, ...] = ()
    known_differences: "Deviations | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Regrouped:
    """A run of the same global batch with these `sizes` of dp, micro, ...: its merged `tensors`.

    flaws      why other tensors did not merge
    problem    why the run did not finish; `undecided`: because of the machine, which says nothing about the subject
    truth      the dense model's tensors in this grouping, if it computes another step there
    """

    sizes: Mapping[str, int]
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    truth: Mapping[str, Tensor] = field(default_factory=dict)
    flaws: tuple[Flaw, ...] = ()
    problem: str = ""
    undecided: bool = False

    @property
    def words(self) -> str:
        """The grouping as words of a case."""
        return " ".join(f"{word}={size}" for word, size in self.sizes.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Regroupings:
    """Runs of the same global batch in other groupings, one at least."""

    runs: tuple[Regrouped, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """What a run without numbers states beside its calls: the memory of the fullest rank, and what is unchecked."""

    memory: Fact
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentLeak:
    """Document number `of` changes document `other`, in the `phase` forward or backward.

    token     the token of the other document that changes most, by its place on the rank; `gap` is by how much
    call      the number of the rank's call of `documents` that shows the change; `place` is the line of that call, and
              `before` the line of the call before it, in the order of the phase
    rounding  whether the gap is as small as rounding
    """

    phase: str
    of: int
    other: int
    rank: int
    call: int
    token: int
    gap: float
    place: str
    before: str = ""
    rounding: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """The documents of one step: how many there are, and the first leak from one to another.

    `problem` is why this could not be checked, else "".
    """

    count: int = 0
    leak: DocumentLeak | None = None
    problem: str = ""


RECORDS = (Calls, RecordedRun, Repeats, Truth, Claims, Regroupings, Documents, DryRun)
"""The records that a check may read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """The first module that differs from the truth's, found without a declared layout. It is a place, not a verdict.

    `phase` is "forward" or "backward", `module` its path ("" is the model itself); `words` say what differs. `summed`
    is the axis over which its tensors are partial sums. Without that, `shown` has the wrong tensor and the truth's, a
    pair for each layout that its shape allows.
    """

    phase: str
    module: str
    words: str
    summed: str = ""
    shown: tuple[tuple[Tensor, Tensor], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What was found to explain a failure.

    shares            gradients, losses, tokens of step 0 by micro-batch, and weights before it (DenseModelLike.shares)
    others            evidence of the same subject in cases that differ in one size, if a cause needs them
    earlier           evidence and findings of the same case, ended before the first wrong step; None if states were
                      returned after every step, or if that run was impossible
    located           the first wrong module, when it was looked for without a declared layout
    low_precision_op  the operator that rounds on several ranks and not on one, if it explains the errors; else ""
    drawn             numbers that only ranks, or only the truth, drew in forward; None where there are none
    other_samples     how the samples of the ranks differ from those of the truth; None where they do not
    other_start       a parameter that a rank begins with other values than the truth; None without one
    unsummed          by rank, the running sum of squares of its gradients, before any sum over ranks
    before_sums       by rank, parameter -> its gradient from backward in the first step, before any sum over ranks
    observed          step and micro-batch of the activations
    """

    shares: Mapping[str, Tensor] = field(default_factory=dict)
    others: "tuple[Evidence, ...]" = ()
    earlier: "tuple[Evidence, Mapping[str, Finding]] | None" = None
    located: Located | None = None
    low_precision_op: str = ""
    drawn: Fact | None = None
    other_samples: Fact | None = None
    other_start: Fact | None = None
    unsummed: tuple[Tensor, ...] = ()
    before_sums: tuple[Mapping[str, Block], ...] = ()
    observed: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All records of one case; None for those whose runs were not made."""

    run: RecordedRun
    claims: Claims
    truth: Truth = field(default_factory=Truth)
    search: Search = field(default_factory=Search)
    repeats: Repeats | None = None
    regroupings: Regroupings | None = None
    documents: Documents | None = None
    dry: DryRun | None = None

    @property
    def records(self) -> tuple[object, ...]:
        """The records that checks may read. After a dry run those with tensors are left out."""
        numbers = () if self.dry else (self.run, self.truth)
        made = (self.run.calls, self.claims, *numbers, self.repeats, self.regroupings, self.documents, self.dry)
        return tuple(record for record in made if record is not None)

    def with_found(self, **found: Any) -> "Evidence":
        """The same with these fields of its search."""
        return replace(self, search=replace(self.search, **found))


def merged_outcomes(
    outcomes: Outcomes, captured: Outcomes, truth: Mapping[str, Tensor], known: Mapping[str, Tensor] | None = None
) -> Merged:
    """The full tensors of what the ranks returned and of what was captured from them. If both have a name, the returned
    one counts.

    `known`: full tensors that were merged from the same outcomes before.
    """
    both = [{**from_outside, **mine} for mine, from_outside in zip(outcomes, captured, strict=False)]
    outside = frozenset[str]().union(*captured)
    kept = {name: tensor for name, tensor in (known or {}).items() if name not in outside}
    return match_truth(merge_outcomes(both or outcomes, kept), truth)
