"""Launches of a program for parity: subprocesses of the user's own launcher, which record values and are ended when all
is recorded.

Each launch has a folder of its own in the run folder: `first`, `second`, `again`, `perturbed-1`, .. What it prints goes
to `output.txt` there. A launch is over when every rank has recorded all steps, or when it ends by itself.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardproof.harness.errors import MachineError, ProgramError, RequestError, TimeLimit
from shardproof.harness.parity.recorded import Launch, read_launch
from shardproof.harness.parity.stages import names_to_begin_with
from shardproof.harness.programs.launch import environment_of
from shardproof.harness.programs.session import ProgramSession, ValueOptions, boot_id
from shardproof.harness.programs.tensors.initial_values import NAMES, NO_CUT
from shardproof.harness.programs.threads.launches import ForkedLaunch, ThreadLaunches
from shardproof.harness.programs.threads.program import RAISED, REFUSED
from shardproof.harness.programs.threads.torchrun_words import read_torchrun
from shardproof.harness.programs.values import FOLDER
from shardproof.harness.run_folder import guard_writing

OUTPUT = "output.txt"
_LAST = 12
"""The most lines of a program's output in an error."""
_LAST_BYTES = 2**18
"""The most bytes of output that are searched for these lines."""
_SUMMARY = "torch/distributed/elastic/multiprocessing/api.py"
"""A part of the line with which torchrun begins to report that a rank has failed. The reason stands before it."""
_LOOK_S = 0.1
_END_S = 10.0
"""How long processes have to end after a SIGTERM."""
_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
"""Signals that a process may get from outside: from the kernel without memory, a user, a batch system."""


_NAMES = {
    "first": "launch A",
    "second": "launch B",
    "again": "launch A again, as it is, to see whether two runs of it agree",
    "perturbed": "launch A again, to see its rounding",
}
"""What a launch is called in a message, by its folder. The folders of perturbed runs end in a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRecorder:
    """How launches are recorded: their first `steps` steps, in a folder below `folder`, each launch in at most
    `timeout_s` seconds.

    All launches record `values`. `heard` is called as every launch begins. `threads` starts the ranks of torchrun's
    commands as threads of one process; with None commands are started unchanged.
    """

    folder: Path
    steps: int
    timeout_s: float
    values: ValueOptions
    heard: Callable[[str], object] = str
    threads: ThreadLaunches | None = None

    def record(self, name: str, command: Sequence[str], **options: Any) -> Launch:
        """Launch a command and read what it recorded; `options` apply to this recording alone.

        Raises ProgramError with its last lines when it fails between its first and last step, TimeLimit when the time
        is up, MachineError when a signal from outside ends it, RequestError when it records nothing.
        """
        kind, _, number = name.partition("-")
        words = f"{_NAMES[kind]}, run {number}" if number and kind in _NAMES else _NAMES.get(name, name)
        what = f"{words} ({shlex.join(command)})"
        self.heard(f"recording {what}")
        folder = self.folder / name
        with guard_writing(folder):
            (folder / "ranks").mkdir(parents=True)
        session = ProgramSession(
            folder=str(folder.resolve()),
            steps=(0, self.steps),
            profile=(),
            silence_s=max(60.0, self.timeout_s),
            stated={},
            origin_s=time.perf_counter(),
            boot=boot_id(),
            command=tuple(command),
            values=replace(self.values, **options),
        )
        status = self._run(folder, command, session)
        if status is None:
            raise TimeLimit(
                f"{what} did not record {self.steps} steps in {self.timeout_s:g} seconds; {_last_lines(folder)}; "
                "legal: a larger --timeout, or smaller sizes"
            )
        if status and not is_recorded(folder):
            lines = _last_lines(folder)
            if self.threads and status == RAISED and read_torchrun(command):
                lines += "; where its ranks cannot be threads, legal: no --engine inproc"
            if self.threads and status == REFUSED:
                raise RequestError(f"{what}: {lines.splitlines()[-1].strip()}")
            if -status in _OUTSIDE:
                raise MachineError(f"{what} was ended by signal {-status} before its last step; {lines}")
            if not (folder / FOLDER).is_dir():
                raise RequestError(f"{what} ended with exit status {status} before its first step; {lines}")
            rule = f"ended with exit status {status} before its last step"
            raise ProgramError(f"{what} {rule}; {lines}")
        if not (folder / FOLDER).is_dir():
            rule = "nothing was recorded: no module of torch was called and no optimizer took a step"
            raise RequestError(f"{what}: {rule}; {_last_lines(folder)}")
        return read_launch(folder)

    def record_same_init(self, name: str, command: Sequence[str], start: str) -> Launch:
        """Launch a command with the initial weights from another recording's folder; with "" from the program's own.

        The groups of ranks may not show how a tensor is sharded, and names may not show which layers a stage holds.
        Then the command is launched a second time: the first recording has digests of the weights that the ranks drew
        themselves (ranks that drew the same ones hold the same part), and shows the order of the stages. Raises what
        `record` raises.
        """
        launch = self.record(name, command, same_init=start)
        lacking = [str(why) for rank in launch.ranks for why in dict(rank.about.get("same_init") or {}).values()]
        names = names_to_begin_with(read_launch(Path(start)), launch) if start else {}
        if not names and not any(why.startswith(NO_CUT) for why in lacking):
            return launch
        parts = (self.folder / name).rename(self.folder / f"{name}-parts")
        _write_names(parts / NAMES, names)
        found = self.record(name, command, same_init=start, parts_of=str(parts.resolve()))
        shutil.rmtree(parts, ignore_errors=True)
        return found

    def _run(self, folder: Path, command: Sequence[str], session: ProgramSession) -> int | None:
        """The exit status of a launch, 0 if it was ended because all is recorded, None if its time was up."""
        process = self._start(folder, command, session)
        end_s = time.monotonic() + self.timeout_s
        try:
            while (status := process.poll()) is None:
                if is_recorded(folder):
                    return 0
                if time.monotonic() > end_s:
                    return None
                time.sleep(_LOOK_S)
            return status
        finally:
            _end_group(process)

    def _start(
        self, folder: Path, command: Sequence[str], session: ProgramSession
    ) -> "subprocess.Popen[bytes] | ForkedLaunch":
        with (folder / OUTPUT).open("wb") as output:
            ranks = read_torchrun(command) if self.threads else None
            if self.threads is not None and ranks is not None:
                return self.threads.start(ranks, session, folder / OUTPUT)
            return subprocess.Popen(
                list(command),
                env=environment_of(session, os.environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def _write_names(file: Path, names: Mapping[tuple[int, str], str]) -> None:
    by_rank: dict[int, dict[str, str]] = {}
    for (rank, name), other in names.items():
        by_rank.setdefault(rank, {})[name] = other
    with guard_writing(file.parent):
        file.write_text(json.dumps(by_rank), encoding="utf-8")


def is_recorded(folder: Path) -> bool:
    """Whether every rank of a launch has recorded all requested steps."""
    abouts = []
    for file in (folder / FOLDER).glob("rank-*.json"):
        try:
            abouts.append(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError):  # it is being written
            return False
    return bool(abouts) and all(
        about.get("done") and len(abouts) >= int(about.get("world_size", 1)) for about in abouts
    )


def _end_group(process: "subprocess.Popen[bytes] | ForkedLaunch") -> None:
    """End all processes of a launch. A launcher gets time to end its own."""
    for number, wait_s in ((signal.SIGTERM, _END_S), (signal.SIGKILL, _END_S)):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
            break
    with suppress(ProcessLookupError, PermissionError):  # workers that outlive their launcher
        os.killpg(process.pid, signal.SIGKILL)


def _last_lines(folder: Path) -> str:
    """The last lines of a launch's output."""
    with (folder / OUTPUT).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
        text = file.read().decode("utf-8", "replace")
    lines = [line for line in text.splitlines() if line.strip()]
    told = next((place for place, line in enumerate(lines) if _SUMMARY in line), 0)
    lines = lines[: told or None][-_LAST:]
    return "its last lines:\n  " + "\n  ".join(lines) if lines else "it printed nothing"
