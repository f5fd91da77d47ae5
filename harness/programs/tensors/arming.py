"""Where the recorder of values starts: when torch is imported, because a single rank initialises nothing else."""

import os

from shardproof.harness.programs.session import VARIABLE, ProgramSession


def arm_values() -> None:
    """Have the values of this process recorded, if the session wants them. torch is imported."""
    session = ProgramSession.of(os.environ[VARIABLE])
    if session.values is not None:
        from shardproof.harness.programs.tensors.hooks import record_process  # noqa: PLC0415  (it imports much of torch)

        record_process(session, session.values)
