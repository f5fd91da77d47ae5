"""Records of what a check states and left open, and of a failed check: facts that are stored. Their sentences are in
`verdicts.sentences` and `verdicts.words`, and nowhere else.

Errors are ratios, and `unit` is the machine epsilon in which they are counted too. Names are those of tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from shardproof.harness.differences import Difference
from shardproof.harness.ledger import PHASES
from shardproof.harness.verdicts.sentences.rendering import sentence_of

Counts = tuple[int, int]
"""How many tensors of a kind, and how many the kind has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """What a check or a cause states: the id of its sentence (`verdicts.sentences`), and the values in it.

    `values` are texts, numbers, facts as mappings, and lists of these. Raises ValueError if there is no such sentence.
    """

    id: str
    values: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        _ = self.text  # a fact without a sentence raises where it is made, and not in a report

    @property
    def text(self) -> str:
        """The fact in words."""
        return sentence_of(self.id, self.values)


def state_fact(id: str, /, **values: Any) -> Fact:
    """The fact of this id with these values, as they would come back from JSON."""
    return Fact(id=id, values={name: _as_stored(value) for name, value in values.items()})


def state_text(text: str) -> Fact:
    """The fact that is a text of a subject, an exception or a tool."""
    return state_fact("text", text=text)


def state_difference(parted: Difference) -> Fact:
    """A difference from the closed form as a fact."""
    if parted.counted:
        return state_fact("count_differs", term=parted.term)
    found, expected = parted.found, parted.expected
    moved = found and expected and not parted.term and found.place != expected.place
    return state_fact(
        "call_differs",
        kind=parted.kind,
        place=(found or parted.line).place,
        calls=parted.calls,
        found=str(found or ""),
        expected=(found and parted.term) or str(expected or ""),
        expected_place=expected.place if moved and expected else "",
    )


def _as_stored(value: Any) -> Any:
    if isinstance(value, Fact):
        return {"id": value.id, "values": value.values}
    return [_as_stored(one) for one in value] if isinstance(value, tuple | list | set | frozenset) else value


class NoteKind(StrEnum):
    """The kind of a note: what it is about."""

    NOT_RETURNED = "not returned"  # names of the truth that no rank returned
    LEFT_OUT = "left out on purpose"  # those that subject.unchecked declares
    NOT_IN_TRUTH = "not in the truth"  # returned names that the truth does not have
    UNDECIDED = "undecided"  # limits would admit half of the tensor, or nothing can be compared
    FLAWED = "has a flaw"  # another check found that the tensor does not merge
    LOOSE = "undecided elements"  # numbers: elements of the tensor that rounding may move by a step, and all of them
    DEVIATES = "stated deviation"
    DEVIATION_ABSENT = "stated deviation that does not occur"
    DEVIATION_APPLIED = "stated deviation that the truth applies"
    LOWER_PRECISION = "lower precision"  # names: the dtype; reason: its origin
    DTYPE_DEPENDENT = "depends on the dtype"  # reason: the operator of the dense model
    CLOSED_FORM = "closed form"  # reason: what it leaves out
    DOUBT = "not certain"  # reason: what the recorder was not certain of
    UNREAD_ROWS = "rows never looked up"
    UNFINISHED_GROUPING = "grouping not finished"  # names: its words; reason: why the subject does not finish it
    SPLIT_SHARE = "share of the parameters that is split"  # numbers: per cent
    NOT_ANSWERED = "not answered"  # names: checks; reason: why they cannot be answered
    NOT_RUN = "not run for want of time"  # names: parts of a case (verdicts.words.PARTS)
    UNCHECKED = "not checked"  # reason: what was not looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class Worst:
    """The tensor (or event) closest to its limit, or furthest beyond it; `epsilons` count its error in the machine
    epsilon of the case's dtype.
    """

    name: str
    error: float
    allowed: float
    epsilons: float


_LEAST: Mapping[NoteKind, Counts] = {
    NoteKind.LOOSE: (1, 2),
    NoteKind.LOWER_PRECISION: (1, 0),
    NoteKind.UNFINISHED_GROUPING: (1, 0),
    NoteKind.SPLIT_SHARE: (0, 1),
}
"""Kind of a note -> the fewest names and numbers that it must have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A limit of a verdict: what was not checked, or not decided, by kind, names and a reason.

    Raises ValueError for a kind without the names or numbers that it is about (_LEAST).
    """

    kind: NoteKind
    names: tuple[str, ...] = ()
    reason: str = ""
    numbers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        names, numbers = _LEAST.get(self.kind, (0, 0))
        if len(self.names) < names or len(self.numbers) < numbers:
            raise ValueError(f"a note of kind {self.kind.value!r} needs {names} names and {numbers} numbers")


def notes_about(**names: tuple[str, ...]) -> tuple[Note, ...]:
    """A note for each kind (`undecided=("grad/w",)`) that has a name."""
    return tuple(Note(kind=NoteKind[kind.upper()], names=own) for kind, own in names.items() if own)


def note_unchecked(*reasons: str) -> tuple[Note, ...]:
    """Notes on what was not checked, for these reasons."""
    return tuple(Note(kind=NoteKind.UNCHECKED, reason=reason) for reason in reasons)


def noted_names(notes: tuple[Note, ...], *kinds: NoteKind) -> list[str]:
    """The names in the notes of these kinds; of all kinds if none is given."""
    return [name for note in notes if not kinds or note.kind in kinds for name in note.names]


@dataclass(frozen=True, slots=True, kw_only=True)
class First:
    """The first place where it went wrong: phase, module and step, and what shows it there.

    `name` is the first wrong tensor, "" when only the ledger shows it. `event` is the first call that differs from the
    expectation, runs over wrong ranks or is never waited for, else "". `phase` and `region` are those of the earlier
    of the two. `step` is -1 for a difference from the expectation, which counts whole runs. `note`: how the module was
    found, "" when a layout was declared. `beside`: the ranks that are wrong and those that are right, and between
    which modules it lies, as far as known.
    """

    phase: str = ""
    region: str = ""
    step: int = -1
    name: str = ""
    event: str = ""
    note: str = ""
    beside: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Where a check failed: mode and number of ranks of the case, the wrong ranks (empty: all, or unknown), step (-1:
    unknown), phase, module and tensor.
    """

    mode: str
    world_size: int
    ranks: tuple[int, ...] = ()
    step: int = -1
    phase: str = ""
    region: str = ""
    tensor: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongTensor:
    """A tensor beyond its limit, in the measure in which it is furthest beyond."""

    name: str
    measure: str
    error: float
    allowed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LikelyCause:
    """A cause by its id (`harness.diagnosing.causes.cause.CAUSES`), and what it states of this tensor and group."""

    id: str
    fact: Fact


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementByKind:
    """Which tensors agree with the truth, by kind, and which do not; for failures without a known cause."""

    wrong: Mapping[str, Counts] = field(default_factory=dict)
    right: Mapping[str, Counts] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RightWith:
    """Words with which a failing case is right, except for checks that fail for another reason."""

    words: str
    but_for: tuple[str, ...] = ()


class WhenKind(StrEnum):
    """The result of the experiments on a failure."""

    NEEDED = "needed"  # the failure needs these words
    NONE_NEEDED = "none needed"  # no word is known to be needed
    UNDECIDED = "undecided"  # no other case shows it
    REFUTED = "refuted"  # the plainest case did not fail again
    NOT_RUN_AGAIN = "not run again"  # no time was left to confirm the statements
    NOT_SEARCHED = "not searched"  # no time was left at all
    OTHER_FAULT = "other fault"  # another fault of the case was examined
    ONLY_IN_THREADS = "only in threads"  # on processes the case passes


@dataclass(frozen=True, slots=True, kw_only=True)
class When:
    """The words of a case that its failure needs, found by running it with words changed.

    `fails` are words with the values with which it fails ("tp=2|4"), `right` words with which it is right. `perhaps`
    are words of which nothing is known, `untried` those for which there was no time. `case` is the case that was tried,
    `runs` how many cases were run for it, in how many `seconds`.
    """

    kind: WhenKind
    case: str = ""
    ranks: int = 0
    fails: tuple[str, ...] = ()
    right: tuple[RightWith, ...] = ()
    perhaps: tuple[str, ...] = ()
    untried: tuple[str, ...] = ()
    runs: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a case ended that left nothing to compare: the lines of its error, and the innermost frames of the user's
    code. `traceback` is the file in the run folder with all of it. Raises ValueError without a line.
    """

    machine: bool
    lines: tuple[str, ...]
    frames: str = ""
    traceback: str = ""

    def __post_init__(self) -> None:
        if not self.lines:
            raise ValueError("lines: an error has one line at least")


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedCheck:
    """A failed check explained: where, by how much, the first place, likely causes, and how to repeat it.

    `end` is None if ranks returned an outcome. `events` are those on which witnesses differ, out of how many. `problem`
    is why nothing more is known: the diagnosis itself failed.
    """

    where: Where
    repeat: str
    wrong: tuple[WrongTensor, ...] = ()
    unit: float = 0.0
    first: First = First()
    causes: tuple[LikelyCause, ...] = ()
    agreement: AgreementByKind = AgreementByKind()
    events: Counts | None = None
    end: End | None = None
    when: When | None = None
    problem: str = ""

    @property
    def fault(self) -> tuple[tuple[LikelyCause, ...], AgreementByKind]:
        """What distinguishes the faults of one case: failures with other causes belong to another fault."""
        return self.causes, self.agreement

    @property
    def place(self) -> tuple[str, str] | None:
        """Phase and module of the first place, None if no phase is known."""
        return (self.first.phase, self.first.region) if self.first.phase in PHASES else None
