"""Where recording begins in a process: after torch.distributed was initialised, when rank and world size are known.

Imported while torch itself is being imported, so nothing of torch is imported here before it is needed.
"""

import functools
import os
import sys
from types import ModuleType
from typing import Any

from shardproof.harness.programs.session import VARIABLE, ProgramSession


def arm(module: ModuleType) -> None:
    """Replace `init_process_group` of torch.distributed.distributed_c10d by one that also starts the recorder.

    A process records once: if its world is initialised again, the same files go on.
    """
    original = module.init_process_group
    started: list[int] = []

    @functools.wraps(original)
    def init_process_group(*args: Any, **words: Any) -> Any:
        result = original(*args, **words)
        if os.getpid() not in started:  # a fork inherits the list, and has no recorder
            started.append(os.getpid())
            try:
                from shardproof.harness.programs.rank import begin  # noqa: PLC0415  (torch is complete only now)

                begin(ProgramSession.of(os.environ[VARIABLE]))
            except Exception as problem:
                sys.stderr.write(f"shardproof: this process is not recorded: {type(problem).__name__}: {problem}\n")
        return result

    module.init_process_group = init_process_group  # type: ignore[attr-defined]
