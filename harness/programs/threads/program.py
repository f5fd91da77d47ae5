"""A program on ranks that are threads of this process: each runs the script as its own `__main__`, recorded as a rank.

Ranks have what torchrun gives them: environment, arguments, a world from init_process_group, and random states of their
own. The program's own modules are imported by every rank (own_modules). Working folder, signals, installed packages and
files belong to the process.
"""

import builtins
import importlib.util
import os
import random
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import NoReturn

import numpy as np
import torch

from shardproof.harness.engines.engine import RunRequest
from shardproof.harness.engines.threads.inproc import InprocEngine, Intervention
from shardproof.harness.engines.threads.rank_state import Namespace
from shardproof.harness.engines.threads.rank_world import leave_uninitialised
from shardproof.harness.errors import ShardproofError
from shardproof.harness.programs.session import ProgramSession, ValueOptions
from shardproof.harness.programs.tensors import numerics
from shardproof.harness.programs.tensors.hooks import RecordingHooks
from shardproof.harness.programs.tensors.names import Enclosing
from shardproof.harness.programs.tensors.recorder import ValueRecorder
from shardproof.harness.programs.threads.own_modules import OwnModules
from shardproof.harness.torch_internals.world import rank_tables

REFUSED = 78
"""The exit status of a program whose ranks cannot be threads. The last line that it prints says why."""
RAISED = 1
"""The exit status of a program of which a rank raised, or whose ranks parted."""
_NOT_FOUND = 2
"""That of a program that cannot be read, as of Python's own."""
_AGENT = {
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "ROLE_NAME": "default",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RUN_ID": "inproc",
}
"""Environment variables that torchrun gives to all ranks of a machine, beside those of
harness.engines.rank_environment.
"""


class _RanksWithModules(Intervention):
    """A run whose ranks have modules of their own."""

    def __init__(self, modules: OwnModules) -> None:
        self._modules = modules

    def places(self, names: Sequence[str]) -> tuple[Namespace, ...]:
        """See Intervention."""
        return (*super().places(names), self._modules)

    def hint(self, error: BaseException, *, others_ran: bool, per_rank: Sequence[str]) -> str:
        """No hint: hints are about subjects."""
        return ""


class _Recording:
    """The recorders of the ranks that are threads of this process."""

    def __init__(self, session: ProgramSession, options: ValueOptions) -> None:
        self._session, self._options = session, options
        self._recorders: dict[int, ValueRecorder] = {}
        self._enclosing = Enclosing()
        self._hooks = RecordingHooks(self._of_thread)
        self.modules = OwnModules()
        numerics.change_process(options)
        self._hooks.arm()

    def begin_rank(self, rank: int) -> None:
        """Record the rank that the calling thread is."""
        numerics.change_thread(self._options)
        recorder = ValueRecorder(self._session, self._options, self._enclosing, self._begin_training, lambda: None)
        self._recorders[rank] = recorder

    def end_rank(self, rank: int) -> None:
        """The program of a rank has ended normally."""
        self._recorders[rank].end()

    def _of_thread(self) -> ValueRecorder | None:
        tables = rank_tables()
        return None if tables is None else self._recorders.get(tables.rank)

    def _begin_training(self) -> None:
        """A rank trains: by now the program has imported all packages that it uses."""
        self._hooks.watch_fsdp()
        if (problem := self.modules.find_shared_state()) is not None:
            _refuse(problem)


def _refuse(problem: str) -> NoReturn:
    """End the process: its ranks cannot be threads."""
    sys.stdout.flush()
    sys.stderr.write(f"{problem}\n")
    sys.stderr.flush()
    os._exit(REFUSED)


class _Main:
    """The script or module that every rank runs, from its words "[-m] NAME arguments". Raises OSError, SyntaxError."""

    def __init__(self, words: Sequence[str]) -> None:
        if words[0] == "-m":
            sys.path.insert(0, "")
            sys.argv = [*words[1:]]
            self._file, self._code = _code_of_module(words[1])
        else:
            sys.argv = [*words]
            sys.path.insert(0, str(Path(words[0]).resolve().parent))
            self._file = words[0]
            self._code = compile(Path(words[0]).read_bytes(), words[0], "exec")

    def run(self) -> None:
        """Run it as the `__main__` of the calling rank."""
        module = ModuleType("__main__")
        module.__dict__.update({"__file__": self._file, "__builtins__": builtins})
        sys.modules["__main__"] = module
        exec(self._code, module.__dict__)  # noqa: S102


def _code_of_module(name: str) -> tuple[str, CodeType]:
    """File and code of a module that `python -m` runs. Raises ImportError where there is none."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    code = getattr(spec.loader, "get_code", lambda _: None)(spec.name) if spec is not None else None
    if spec is None or code is None:
        raise ImportError(f"no code object available for {name}")
    return str(spec.origin), code


def run_program(ranks: int, session_text: str, words: Sequence[str]) -> int:
    """Run a program, "[-m] NAME arguments", on this number of ranks. Returns the exit status of the process.

    A program that ends itself, as argparse does, has printed what it has to say: no traceback follows that.
    """
    session = ProgramSession.of(session_text)
    os.environ.update({**_AGENT, "ROLE_WORLD_SIZE": str(ranks)})
    recording = _Recording(session, session.values or ValueOptions())
    try:
        main = _Main(words)
    except (ImportError, OSError, SyntaxError) as problem:
        sys.stderr.write(f"{problem}\n")
        return _NOT_FOUND
    try:

        def run_rank(rank: int) -> None:
            leave_uninitialised()
            random.seed()
            np.random.seed()  # torch alone begins every process with the same seed
            os.environ["ROLE_RANK"] = str(rank)
            recording.begin_rank(rank)
            main.run()
            recording.end_rank(rank)

        seed = torch.default_generator.initial_seed()
        request = RunRequest(program=run_rank, args=(), world_size=ranks, seed=seed, timeout_s=session.silence_s)
        InprocEngine().run_request(request, None, _RanksWithModules(recording.modules))
    except (ShardproofError, OSError) as problem:
        if isinstance(problem.__cause__, SystemExit):
            code = problem.__cause__.code
            sys.stderr.write("" if isinstance(code, int) else f"{code}\n")
            return code if isinstance(code, int) else RAISED
        if problem.__cause__ is not None:
            traceback.print_exception(problem.__cause__)
        sys.stderr.write(f"{problem}\n")
        return RAISED
    return 0
