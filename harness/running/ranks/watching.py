"""Observes ranks that run in this process: the ledger, activations, what autograd saves, overlap."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from shardproof.harness.engines.engine import Unwaited
from shardproof.harness.errors import Desynchronised, ProgramError
from shardproof.harness.ledger import Event, Observer, order_of_phase
from shardproof.harness.outcome.blocks import Block, blocks
from shardproof.harness.protocols import CaseLike, Subject
from shardproof.harness.recording.capturing.module_calls import Capture
from shardproof.harness.recording.documents import DocumentsNoted
from shardproof.harness.recording.measures import Overlap, RankCallIndex, SavedActivations
from shardproof.harness.recording.recorder import Recorder
from shardproof.harness.subject import Unanswered, answer_question

if TYPE_CHECKING:
    from shardproof.harness.recording.lanes import Site
    from shardproof.harness.recording.spans import RankSpan

Localized = dict[str, tuple[Block, ...]]
_SITE = "__shardproof_site__"
"""The attribute by which a rank's exception takes the place where it was raised to the process that reports it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """The result of one run: outcomes and captured activations by rank, and the ledger if it was recorded.

    `unwaited` are asynchronous calls that were never waited for, `problem` says why activations could not be placed.
    `saved_bytes` by rank is the most that autograd held for backward, () if not measured. `hidden` are the calls (rank,
    call index) during which their rank computed a product, None if not measured. `spans` are those of pipeline ranks
    that ran at the same time. `packed`: the recorded ranks stated documents.
    """

    outcomes: tuple[Localized, ...]
    captured: tuple[Localized, ...] = ()
    events: tuple[Event, ...] = ()
    unwaited: tuple[Unwaited, ...] = ()
    seconds: float = 0.0
    problem: str = ""
    saved_bytes: tuple[int, ...] = ()
    hidden: frozenset[RankCallIndex] | None = None
    spans: "tuple[RankSpan, ...]" = ()
    packed: bool = False

    @classmethod
    def join_ranks(cls, ranks: "Sequence[Execution]") -> "Execution":
        """The results of all ranks, from the results that each rank made for itself."""
        problem = next((rank.problem for rank in ranks if rank.problem), "")
        measured = [rank.hidden for rank in ranks if rank.hidden is not None]
        return cls(
            outcomes=tuple(outcome for rank in ranks for outcome in rank.outcomes),
            captured=() if problem else tuple(captured for rank in ranks for captured in rank.captured),
            events=tuple(event for rank in ranks for event in rank.events),
            problem=problem,
            saved_bytes=tuple(size for rank in ranks for size in rank.saved_bytes),
            hidden=frozenset[RankCallIndex]().union(*measured) if measured else None,
            spans=tuple(span for rank in ranks for span in rank.spans),
            packed=any(rank.packed for rank in ranks),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Watching:
    """The observers of the ranks of this process in one run; None for those that the run does not need.

    The engine notifies `observer` of calls.
    """

    case: CaseLike
    subject: Subject
    saved: SavedActivations | None
    hiding: Overlap | None
    capture: Capture | None
    recorder: Recorder | None
    observer: Observer | None
    noted: DocumentsNoted = field(default_factory=DocumentsNoted)

    @contextmanager
    def on_rank(self, rank: int) -> Iterator[None]:
        """To be entered in the thread of a rank, around its program."""
        with ExitStack() as entered:
            for watcher in (
                self.capture,
                self.saved,
                self.hiding,
                self.recorder,
                self.noted if self.recorder else None,
            ):
                if watcher is not None:
                    entered.enter_context(watcher.on_rank(rank))
            try:
                yield
            except Exception as error:
                if self.recorder is not None:
                    error.__dict__[_SITE] = _plain(self.recorder.site_raised(rank, error))
                raise

    def locate(self, error: ProgramError) -> None:
        """Set `error.site`, if this process has recorded the ranks that parted."""
        if self.recorder is None or not isinstance(error, Desynchronised):
            return
        waiting = [position.rank for position in error.positions if position.op]
        parted = [rank for rank in waiting if rank in error.ranks] or waiting
        sites = [site for rank in parted if (site := self.recorder.site_of_last_call(rank))]
        # A rank that left a call out is further on in training, so the ranks parted where the other one waits.
        first = min(sites, key=lambda site: (site.step, site.microbatch, order_of_phase(site.phase)), default=None)
        error.site = _plain(first)

    def execution(self, ranks: Sequence[int], outcomes: Sequence[Localized]) -> Execution:
        """The result: these outcomes, and what was observed of these ranks."""
        captured: list[Localized] = []
        problem = ""
        try:
            if capture := self.capture:
                captured = answer_question(
                    "activations", lambda: [self._place_captured(rank, capture) for rank in ranks]
                )
        except Unanswered as error:  # the subject's statement of its layout is wrong: that is noted, and the run stands
            problem = str(error)
        return Execution(
            outcomes=tuple(outcomes),
            captured=tuple(captured),
            events=tuple(self.recorder.events()) if self.recorder else (),
            problem=problem,
            saved_bytes=tuple(map(self.saved.peak_bytes, ranks)) if self.saved else (),
            hidden=frozenset(self.hiding.hidden) if self.hiding else None,
            packed=self.noted.seen,
        )

    def _place_captured(self, rank: int, capture: Capture) -> Localized:
        """The captured tensors of one rank as blocks of full ones, without modules that have no counterpart."""
        place = getattr(self.subject, "activations")  # noqa: B009  (optional, so the protocol does not declare it)

        def place_locals(kind: str, locals_: Mapping[str, Tensor]) -> Localized:
            shards = {module: place(self.case, rank, module, local) for module, local in locals_.items()}
            return {f"{kind}/{module}": blocks(shard) for module, shard in shards.items() if shard is not None}

        return place_locals("act", capture.outputs(rank)) | place_locals("act_grad", capture.gradients(rank))


def locate_raise(error: ProgramError) -> None:
    """Set `error.site` to the place that was recorded on the rank whose exception caused it."""
    error.site = getattr(error.__cause__, "__dict__", {}).get(_SITE, error.site)


def _plain(site: "Site | None") -> tuple[int, str, str]:
    """Step, phase and module."""
    return (-1, "", "") if site is None else (site.step, site.phase, site.region)
