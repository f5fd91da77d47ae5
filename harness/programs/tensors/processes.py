"""Values of a process that is one rank, recorded from where torch is imported to where the interpreter ends."""

import atexit
import multiprocessing
from multiprocessing.util import Finalize

from shardproof.harness.programs.session import ProgramSession, ValueOptions
from shardproof.harness.programs.tensors import numerics
from shardproof.harness.programs.tensors.hooks import RecordingHooks
from shardproof.harness.programs.tensors.names import Enclosing
from shardproof.harness.programs.tensors.recorder import ValueRecorder


def record_process(session: ProgramSession, options: ValueOptions) -> None:
    """Record this process as the rank that it turns out to be."""

    def begin() -> None:
        hooks.watch_fsdp()
        atexit.register(recorder.end)
        if multiprocessing.parent_process() is not None:  # a forked one ends without the functions of atexit
            Finalize(None, recorder.end, exitpriority=0)

    numerics.change_process(options)
    numerics.change_thread(options)
    hooks = RecordingHooks(lambda: recorder)
    recorder = ValueRecorder(session, options, Enclosing(), begin, hooks.leave_modules)
    hooks.arm()
