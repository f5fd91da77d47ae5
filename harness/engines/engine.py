"""The interface of every engine: one way to run a program on all ranks, the driver always outside of the ranks.

Engines differ in what a rank is (a thread here, a process of a pool, a torchrun worker, one rank on meta tensors) and
agree on everything that the rest of the harness sees: results by rank, the observer's calls, the errors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

from harness.ledger import Observer

__all__ = ["Engine", "Program", "Unwaited"]

Program = Callable[..., Any]
"""`program(rank, *args)`, called once on every rank with torch.distributed initialised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unwaited:
    """An asynchronous call whose work was never waited for. `number` counts the rank's calls in `group` from 0."""

    rank: int
    op: str
    number: int
    group: str
    caller: str


class Engine(Protocol):
    """Runs programs on ranks; a context manager. The same engine runs any number of programs, also after errors."""

    @property
    def name(self) -> str:
        """The word that chooses this engine on the command line."""
        ...

    @property
    def remote(self) -> bool:
        """Whether ranks live in other processes: programs and results are pickled, and nobody is observed from here."""
        ...

    @property
    def unwaited(self) -> tuple[Unwaited, ...]:
        """The works of the last run that nobody waited for, by rank, in the order of issue."""
        ...

    def run(
        self,
        program: Program,
        *args: Any,
        world_size: int,
        observer: Observer | None = None,
        seed: int = 0,
        timeout_s: float = 60.0,
    ) -> list[Any]:
        """The results of `program(rank, *args)` by rank.

        Every rank starts with its random streams at `seed`. A remote engine takes no observer: one is made inside of
        every rank (harness.running.rank_task). Raises RequestError (exit status 2), ProgramError (1) or
        MachineError (3); the engine stays usable.
        """
        ...

    def close(self) -> None:
        """Give back what the engine holds; a closed engine refuses to run."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...
