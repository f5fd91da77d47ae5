"""Where the recorder of values begins to look: when torch is imported; one rank alone initialises nothing else."""

import os

from shardproof.harness.programs.session import VARIABLE, ProgramSession


def arm_values() -> None:
    """Have the values of this process recorded, where the session wants them; torch is imported."""
    session = ProgramSession.of(os.environ[VARIABLE])
    if session.values is not None:
        from shardproof.harness.programs.tensors.hooks import record_process  # noqa: PLC0415  (it imports much of torch)

        record_process(session, session.values)
