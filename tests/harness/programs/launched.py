"""Scripts and modules as a launcher starts them, recorded or not: one process a rank, with torchrun's environment.

The processes are forked from one that has imported torch, which saves some seconds of a processor a rank. The recorder
is armed as in the hook (harness.programs.hook).
"""

import argparse
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from torch.distributed import distributed_c10d

import tests.forked
from shardproof.harness.programs.arming import arm
from shardproof.harness.programs.launch import request_of
from shardproof.harness.programs.session import VARIABLE, new_session
from shardproof.harness.programs.tensors.arming import arm_values
from shardproof.harness.programs.traced import axis_of
from shardproof.harness.traces.reading import read_traces
from shardproof.harness.witnesses.agreement import Sighting, agreement, of_ledger
from shardproof.reports.options.command_options import add_options
from shardproof.reports.programs import figures
from shardproof.reports.stored.frames import Run
from tests import ROOT

LIMIT_S = 240.0


def environment(folder: Path, **words: str) -> dict[str, str]:
    """An environment in which our packages are found and no launcher is."""
    kept = {name: value for name, value in os.environ.items() if name in {"PATH", "HOME", "LANG", "LD_LIBRARY_PATH"}}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder), **words}


def ran(folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """A command that has ended in this folder; `more` are words of its environment."""
    return subprocess.run(
        words, cwd=folder, env=environment(folder, **more), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def seen_alike(run: Run, witness: str, seen: Sequence[Sighting]) -> None:
    """Assert that a witness saw the calls of a recorded run one by one; a trace has no phase before a forward."""
    calls = figures.add_group_ranks(run)
    ours = [replace(one, phase="") for one in of_ledger(figures.list_events(calls[calls["ranks"] != ""]))]
    found = agreement(ours, {witness: [replace(one, phase="") for one in seen]})
    assert [str(row) for row in found.broken] == []
    assert len(found.rows) == len(seen) == len(run.ledger)


def read_alike(run: Run, world_size: int) -> None:
    """Assert that its traces, read back with the Flight Recorder's dumps, are its ledger, call by call.

    On gloo nothing knows the groups of messages.
    """
    rows = run.ledger.astype({"op": "str", "axis": "str"})
    messages = rows["op"].isin(["send", "recv"])
    rows = rows.assign(axis=rows["axis"].mask(messages, "?"), group_size=rows["group_size"].mask(messages, -1))
    traces = read_traces([str(run.path / "traces")])
    assert [trace.rank for trace in traces] == [*range(world_size)]
    for trace in traces:
        own = rows[rows["rank"] == trace.rank][["op", "axis", "group_size", "dtype", "payload_bytes"]]
        read = [(c.op, axis_of(c, world_size), c.group_size or -1, c.dtype, c.payload_bytes) for c in trace.calls]
        assert read == [*own.itertuples(index=False, name=None)]


def forked(
    folder: Path, script: str, *words: str, world: int = 2, record: Sequence[str] | None = None, **more: str
) -> list[tests.forked.Forked]:
    """Run a script of `folder`, or a module by its dotted name, on every rank; the ranks run when this returns.

    With `record` they are recorded with those words; `more` are words of their environment.
    """
    text = ""
    if record is not None:
        parser = argparse.ArgumentParser()
        add_options(parser)
        options = request_of(parser.parse_args(record), wraps=False)
        text = new_session(str(folder / "runs"), Path(script).stem, [script, *words], options).text
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(world), **more}
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    return [
        tests.forked.started(_rank, script, words, text, folder=folder, environment={**meeting, **place})
        for place in places
    ]


def _rank(script: str, words: Sequence[str], session: str) -> int:
    sys.argv = [script, *words]
    sys.path.insert(0, str(Path.cwd()))
    if session:
        os.environ[VARIABLE] = session
        arm(distributed_c10d)
        arm_values()
        dist.init_process_group = distributed_c10d.init_process_group  # torch.distributed was imported before
    if script.endswith(".py"):
        runpy.run_path(script, run_name="__main__")
    else:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    return 0
