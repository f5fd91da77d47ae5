"""A recording: the run folder that all ranks share, what is recorded, and how the ranks' processes learn both.

All of it is passed in one environment variable, so every Python process below a launcher finds it, on every machine
with the same file system. No torch is imported here: this process is replaced by the program, and a rank imports this
module while torch itself is being imported.
"""

import atexit
import fcntl
import hashlib
import json
import multiprocessing
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from multiprocessing import util
from pathlib import Path
from typing import TypedDict

from shardproof.harness.errors import RequestError
from shardproof.harness.run_folder import guard_writing, link_latest, new_run_folder

NOT_INSTALLED = (
    "values are kept in files of the package safetensors, which is not installed; legal: pip install safetensors"
)

VARIABLE = "SHARDPROOF_RECORD"
TOOLS = ("torch", "nsys")
_JOBS = (
    ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"),
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ("PMIX_NAMESPACE",),
)
"""Environment variables with equal values on the ranks of one launch, by launcher: torchrun, SLURM, MPI."""
_TOGETHER_S = 600.0
"""The ranks of one launch start within this time of each other."""
_LOCK_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueOptions:
    """How values are recorded beside calls (harness.programs.values): the budget of a rank and step in GiB, and what is
    changed of the program's numbers: `dtype` "float64", `dropout` off, the initial weights of `same_init` (a folder),
    results moved by rounding with the seed `perturb` (0: not). `parts_of` is an earlier recording of the same launch,
    which shows the ranks that hold the same part ("": there is none).
    """

    budget_gib: float = 2.0
    dtype: str = ""
    dropout: bool = True
    same_init: str = ""
    perturb: int = 0
    parts_of: str = ""


class Options(TypedDict):
    """Options of a session, besides its folder and its program."""

    steps: tuple[int, int] | None
    profile: tuple[str, ...]
    silence_s: float
    stated: Mapping[str, object]
    values: ValueOptions | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSession:
    """A recording. `steps`: first and end (not included), None for all.

    `silence_s`: after how long a silence a rank writes its place down. `stated`: what the user knows and a recorder
    cannot see, for the reports (harness.programs.launch). `values`: None to record calls alone. `origin_s` is time 0 of
    the machine whose name is `boot`.
    """

    folder: str
    steps: tuple[int, int] | None
    profile: tuple[str, ...]
    silence_s: float
    stated: Mapping[str, object] = field(default_factory=dict)
    values: ValueOptions | None = None
    origin_s: float
    boot: str
    command: tuple[str, ...]

    @property
    def text(self) -> str:
        """The value of the environment's variable."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> "ProgramSession":
        """The session that `text` holds."""
        words = json.loads(text)
        steps = words["steps"]
        values = None if words["values"] is None else ValueOptions(**words["values"])
        words |= {"steps": None if steps is None else (steps[0], steps[1]), "values": values}
        return cls(**words | {name: tuple(words[name]) for name in ("profile", "command")})

    def covers(self, step: int) -> bool:
        """Whether a step is recorded."""
        return self.steps is None or self.steps[0] <= step < self.steps[1]


def boot_id() -> str:
    """The name of this machine since its boot: time.perf_counter of its processes is one clock."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return os.uname().nodename


def call_at_end(function: Callable[[], object]) -> None:
    """Have a function called when this process exits normally."""
    atexit.register(function)
    if multiprocessing.parent_process() is not None:  # such a process does not run the functions of atexit
        util.Finalize(None, function, exitpriority=0)


def report_failure(what: str, problem: Exception) -> str:
    """Print once on standard error that a recorder has failed; `what` follows. Returns the end of the traceback."""
    with suppress(OSError, ValueError):
        text = f"{type(problem).__name__}: {problem}".splitlines()[0]
        sys.stderr.write(f"shardproof: {what}: {text}; the program goes on\n")
    return "".join(traceback.format_exception(problem)[-6:])


def steps_of(
    word: str | None, option: str = "steps", legal: str = "--steps 10:20, the steps 10 to 19"
) -> tuple[int, int] | None:
    """First and end of "10:20". Raises RequestError for anything else, with the name of this option."""
    if word is None:
        return None
    if not (found := re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", word)):
        raise RequestError(f"{option}={word}: must be FIRST:END, steps from FIRST on, END not included; legal: {legal}")
    steps = int(found[1]), int(found[2])
    if steps[0] >= steps[1]:
        raise RequestError(f"{option}={word}: holds no step, for END is not included; legal: {legal}")
    return steps


def values_of(
    budget: str | None, *, wanted: bool, dtype: str | None, dropout: bool, same_init: str | None, perturb: str | None
) -> ValueOptions | None:
    """How values are recorded, None if they are not. Raises RequestError for wrong options, and for options of values
    without --values.
    """
    words = {"--budget": budget, "--dtype": dtype, "--same-init": same_init, "--perturb": perturb}
    given = [name for name, word in words.items() if word is not None] + ["--no-dropout"] * (not dropout)
    if not wanted:
        if given:
            raise RequestError(f"{given[0]}: is about values, which are not recorded; legal: --values {given[0]}")
        return None
    if find_spec("safetensors") is None:
        raise RequestError(NOT_INSTALLED)
    if dtype not in (None, "float64"):
        raise RequestError(f"dtype={dtype}: must be float64, or left out for the program's own; legal: --dtype float64")
    gib = 0.0
    with suppress(ValueError):
        gib = 2.0 if budget is None else float(budget)
    if not 0 < gib < 1e6:
        raise RequestError(f"budget={budget}: must be the GiB of a rank's values in a step; legal: --budget 2")
    if perturb is not None and not (perturb.isdecimal() and 0 < int(perturb) < 2**31):
        raise RequestError(f"perturb={perturb}: must be a seed, a whole number from 1 on; legal: --perturb 1")
    if same_init is not None and not Path(same_init, "values").is_dir():
        raise RequestError(f"same-init={same_init}: holds no values; legal: a folder of `shardproof record --values`")
    return ValueOptions(
        budget_gib=gib,
        dtype=dtype or "",
        dropout=dropout,
        same_init="" if same_init is None else str(Path(same_init).resolve()),
        perturb=int(perturb or 0),
    )


def tools_of(word: str | None, steps: tuple[int, int] | None) -> tuple[str, ...]:
    """The profilers of "torch,nsys". Raises RequestError for an unknown one, and for torch without steps."""
    tools = tuple(dict.fromkeys(tool for tool in (word or "").split(",") if tool))
    for tool in tools:
        if tool not in TOOLS:
            raise RequestError(f"profile={tool}: is not a profiler; legal: {','.join(TOOLS)}")
    if "torch" in tools and steps is None:
        rule = "torch's profiler keeps every operator, so it needs the steps to watch"
        raise RequestError(f"profile={word}: {rule}; legal: --profile {word} --steps 10:12")
    return tools


def silence_of(word: str) -> float:
    """The seconds of silence after which a rank writes its place down. Raises RequestError."""
    with suppress(ValueError):
        if 1 <= (seconds := float(word)) < 1e6:
            return seconds
    raise RequestError(f"silence={word}: must be seconds, at least 1; legal: --silence 60")


def new_session(out: str, name: str, command: Sequence[str], options: Options) -> ProgramSession:
    """A session with a folder of its own, `<out>/<time>-<name>`, to which `<out>/latest` leads. Raises RequestError."""
    folder = new_run_folder(Path(out), name)
    with guard_writing(folder):
        (folder / "ranks").mkdir()
    link_latest(folder)
    return ProgramSession(
        folder=str(folder.resolve()), **options, origin_s=time.perf_counter(), boot=boot_id(), command=tuple(command)
    )


def shared_session(
    out: str, name: str, command: Sequence[str], environ: Mapping[str, str], options: Options
) -> tuple[ProgramSession, bool]:
    """The session of the launch to which this process belongs, and whether this process made it.

    A process without a launcher has a session of its own. Raises RequestError if the folder cannot be written.
    """
    key = _launch(environ)
    if not key:
        return new_session(out, name, command, options), True
    with guard_writing(Path(out)):
        ticket = Path(out) / ".sessions" / hashlib.sha256(key.encode()).hexdigest()[:16]
        ticket.parent.mkdir(parents=True, exist_ok=True)
        with _lock_file(ticket.with_suffix(".lock")):
            with suppress(FileNotFoundError):
                if time.time() - ticket.stat().st_mtime < _TOGETHER_S:
                    return ProgramSession.of(ticket.read_text(encoding="utf-8")), False
            made = new_session(out, name, command, options)
            ticket.write_text(made.text, encoding="utf-8")
            return made, True


def _launch(environ: Mapping[str, str]) -> str:
    """Words that only the ranks of this launch have in common, "" without a launcher."""
    for names in _JOBS:
        if names[0] in environ:
            words = [environ.get(name, "") for name in names]
            # On one machine all ranks have one parent process, so a later launch is never taken for this one.
            alone = environ.get("GROUP_WORLD_SIZE") == "1"
            return "\n".join([*words, f"{boot_id()} {os.getppid()}" if alone else ""])
    return ""


@contextmanager
def _lock_file(path: Path) -> Iterator[None]:
    """Hold the lock of a file, waiting for a bounded time. Raises OSError if another process keeps it."""
    with path.open("a") as file:
        end_s = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end_s:
                    raise
                time.sleep(0.02)
        yield
