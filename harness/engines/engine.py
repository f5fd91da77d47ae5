"""The interface of every engine: one way to run a program on all ranks, driven from outside the ranks.

Engines differ in what a rank is (a thread here, a process of a pool, a torchrun worker, one rank on meta tensors). They
agree on everything that the rest of the harness sees: results by rank, the observer's calls, the errors.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from shardproof.harness.errors import RequestError
from shardproof.harness.ledger import Observer

Program = Callable[..., Any]
"""`program(rank, *args)`, called once on every rank with torch.distributed initialised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """A run of a program; `per_rank` names modules whose state every rank has for itself (see Engine.run).

    Raises RequestError for a world without ranks, or a time limit (s) that is not positive.
    """

    program: Program
    args: tuple[Any, ...]
    world_size: int
    seed: int
    timeout_s: float
    per_rank: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise RequestError(f"world_size {self.world_size}: must be at least 1; legal: 2")
        if not self.timeout_s > 0:
            raise RequestError(f"timeout_s {self.timeout_s}: must be above 0; legal: 60")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unwaited:
    """An asynchronous call whose work was never waited for. `number` counts the rank's calls in `group` from 0."""

    rank: int
    op: str
    number: int
    group: str
    caller: str


class Engine(ABC):
    """Runs programs on ranks; a context manager. The same engine runs any number of programs, also after errors.

    `name` is its name on the command line. `remote`: ranks live in other processes, so programs and results are pickled
    and no observer is called here. `unwaited` are the works of the last run that were never waited for, by rank, in the
    order of issue. `alive` is called during work that the limit of a run does not include, such as starts of processes.
    """

    name: str
    remote: bool
    unwaited: tuple[Unwaited, ...] = ()
    alive: Callable[[], object] = staticmethod(str)
    _closed = False

    def run(
        self,
        program: Program,
        *args: Any,
        world_size: int,
        observer: Observer | None = None,
        seed: int = 0,
        timeout_s: float = 60.0,
        per_rank: Sequence[str] = (),
    ) -> list[Any]:
        """The results of `program(rank, *args)` by rank.

        Every rank starts with its random streams at `seed`; on `dry` torch's alone. A remote engine takes no observer:
        harness.running.ranks.execution makes one inside every rank. `per_rank` names modules whose globals, class
        attributes and singletons every rank has for itself, as in a process of its own; only ranks that share a process
        need it. Raises RequestError (exit status 2), ProgramError (1) or MachineError (3); the engine stays usable.
        """
        request = RunRequest(
            program=program, args=args, world_size=world_size, seed=seed, timeout_s=timeout_s, per_rank=tuple(per_rank)
        )
        return self.run_request(request, observer)

    @abstractmethod
    def run_request(self, request: RunRequest, observer: Observer | None) -> list[Any]:
        """The results by rank; see `run`."""

    def close(self) -> None:
        """Release what the engine holds; a closed engine refuses to run."""
        if not self._closed:
            self._closed = True
            self._release()

    def _require_open(self) -> None:
        """Raises RequestError when the engine is closed."""
        if self._closed:
            raise RequestError(f"run: the engine is closed; legal: a new {type(self).__name__}()")

    def _release(self) -> None:  # noqa: B027  (most engines hold nothing)
        """Release what the engine holds from run to run, if anything."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
