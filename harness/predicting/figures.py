"""Parts of a forecast: memory, calls and bytes of a case, and of each stage of its pipeline.

Bytes that training keeps of a parameter are by formula. AdamW as Megatron-LM trains adds gradients up in float32, and
two moments are float32. Where parameters have 16 bits a float32 master copy stands beside them:

    parameters        parameter  gradient  master  moments  together
    bfloat16, float16         2         4       4        8        18
    float32                   4         4       0        8        16
    float64                   8         8       0       16        32

Over d data ranks, a distributed optimizer splits master and moments: 6 + 12/d for 16 bits, 8 + 8/d for float32.
Source: Megatron-LM, docs/source/api-guide/dist_optimizer.md, "theoretical memory"; the row of float64, which Megatron
has not, is the same rule at 8 bytes. Units: bytes; bytes of calls are payloads of one rank in a step.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from shardproof.harness.differences import find_differences
from shardproof.harness.ledger import wire_bytes
from shardproof.harness.predicting.dry_run import DryRank
from shardproof.harness.protocols import ActionLike, CaseLike, Subject
from shardproof.harness.subject import named_axes, state_terms
from shardproof.harness.terms import EventKey, closed_forms
from shardproof.harness.verdicts.facts import state_difference

EQUAL = "equal"
"""Value of `Forecast.ledger` when the dry run issued exactly the events of the closed form."""
FORWARD, BACKWARD = "F", "B"
DEPTHS = (3, 5)
"""The layers at which a deep model is measured: few, but enough that the first and the last differ from the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one rank; `peak` is the most that all tensors held at once in a step, temporary ones included.

    Building the model may need more; that is not counted if two micro-batches or more were run. `trained` are the
    elements that the optimizer steps, 0 when the program steps no torch optimizer; then gradients and optimizer are not
    known. `learned` are the elements of all parameters that require a gradient.
    """

    trained: float
    learned: float
    parameters: float
    gradients: float
    optimizer: float
    saved: float
    peak: float

    @classmethod
    def of(cls, rank: DryRank, peak: float) -> "Memory":
        """Memory of a rank that was run dry, with this peak."""
        return cls(
            trained=float(rank.trained),
            learned=float(rank.learned),
            parameters=float(rank.parameter_bytes),
            gradients=float(rank.gradient_bytes),
            optimizer=float(rank.optimizer_bytes),
            saved=float(rank.saved_bytes),
            peak=float(peak),
        )

    def over_steps(self, states: "States | None") -> "Memory":
        """This memory, with what the optimizer keeps added to the peak: from the second step on it is there all the
        time.

        With `states`, gradients and optimizer are given by their formula.
        """
        one = self
        if states and self.trained:
            gradients = states.gradient * self.learned
            peak = self.peak + gradients - self.gradients
            one = replace(self, gradients=gradients, optimizer=states.optimizer * self.trained, peak=peak)
        return replace(one, peak=one.peak + one.optimizer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Calls and bytes of one rank in one step, from the closed form.

    `messages` are those that it sends to other stages, `lines` all calls by their fields.
    """

    calls: int
    payload_bytes: int
    wire_bytes: int
    messages: int = 0
    message_bytes: int = 0
    lines: Counter[EventKey] = field(default_factory=Counter, repr=False, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageForecast:
    """A stage of a pipeline, represented by one rank.

    `live` is the largest number of micro-batches (of one chunk) in flight, `layers` are those of the stage, `run` is
    the rank that was run.
    """

    index: int
    layers: int
    live: int
    memory: Memory
    traffic: Traffic | None
    ledger: str
    run: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A case of any size. `tokens` are those of all ranks in a step; 0: the case has none.

    `ledger` says how the dry run compares with the closed form: "equal", the first difference, or that none is stated.
    `depths` are the numbers of layers that were run, () when the model itself was run. For a pipeline, `stages` are its
    stages; `memory` and `traffic` are those of the stage with the largest peak.
    """

    case: CaseLike
    memory: Memory
    tokens: int
    ledger: str
    traffic: Traffic | None
    depths: tuple[int, ...] = ()
    stages: tuple[StageForecast, ...] = ()


def traffic_by_rank(case: CaseLike, subject: Subject, ranks: Sequence[int] = (0,)) -> tuple[Traffic | None, ...]:
    """Calls and bytes of each of these ranks in one step by the closed form; None when it does not state all fields."""
    terms = state_terms(case.but(steps=1), subject)
    forms = {} if terms is None else closed_forms(terms, ranks, named_axes(case, subject))
    return tuple(
        _sum_traffic(form.complete) if (form := forms.get(rank)) and not form.partial else None for rank in ranks
    )


def _sum_traffic(complete: Counter[EventKey]) -> Traffic:
    messages = {line: calls for line, calls in complete.items() if line.phase == "pipeline" and line.op == "send"}
    return Traffic(
        calls=complete.total(),
        payload_bytes=sum(calls * line.payload_bytes for line, calls in complete.items()),
        wire_bytes=sum(
            calls * wire_bytes(line.op, line.payload_bytes, line.group_size) for line, calls in complete.items()
        ),
        messages=sum(messages.values()),
        message_bytes=sum(calls * line.payload_bytes for line, calls in messages.items()),
        lines=complete,
    )


def first_difference(ledgers: Iterable[str]) -> str:
    """The first of several comparisons that is not "equal"."""
    return next((ledger for ledger in ledgers if ledger != EQUAL), EQUAL)


def compare_with_closed_form(case: CaseLike, subject: Subject, rank: DryRank) -> str:
    """How the ledger of a dry run compares with the closed form: "equal", or the first difference."""
    terms = state_terms(case, subject)
    if terms is None:
        return "the subject states no closed form"
    parted = find_differences(rank.events, terms, (rank.rank,), axes=named_axes(case, subject))
    return f"differs: {state_difference(parted[0]).text}" if parted else EQUAL


def two_depths(case: CaseLike) -> tuple[int, int]:
    """The layers at which a deep case is measured: DEPTHS units behind those layers that differ."""
    first, unit = getattr(case, "repeating_layers", (0, 1))
    low, high = (first + unit * depth for depth in DEPTHS)
    return low, high


def line_weights(layers: float, low: int, high: int) -> tuple[float, float]:
    """The weights of the two measured depths for a line through both, at this number of layers."""
    share = (layers - low) / (high - low)
    return 1 - share, share


def count_live(program: Sequence[ActionLike]) -> int:
    """The largest number of micro-batches of a chunk whose forward is done and whose backward is not."""
    live = most = 0
    for action in program:
        live += {FORWARD: 1, BACKWARD: -1}.get(action.kind, 0)
        most = max(most, live)
    return most


def data_ranks(case: CaseLike) -> int:
    """Ranks that see different data."""
    lists: Mapping[str, tuple[tuple[int, ...], ...]] = case.axes
    return len(lists["dp"][0]) if "dp" in lists else 1


_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Bytes that are kept for every element of a parameter; `moments` are both together."""

    parameter: int
    gradient: int
    master: int
    moments: int

    @property
    def optimizer(self) -> int:
        """Bytes that the optimizer keeps from step to step."""
        return self.master + self.moments

    @property
    def together(self) -> int:
        """Parameter, gradient, master and moments."""
        return self.parameter + self.gradient + self.optimizer


def mixed_adamw(dtype: str) -> States:
    """The states of AdamW for parameters of this dtype ("bfloat16"). Raises ValueError for one that is no float."""
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise ValueError(f"dtype={dtype}: must be a floating-point dtype; legal: bfloat16")
    wide = max(kind.itemsize, _FLOAT32_BYTES)
    return States(
        parameter=kind.itemsize, gradient=wide, master=wide if kind.itemsize < _FLOAT32_BYTES else 0, moments=2 * wide
    )
