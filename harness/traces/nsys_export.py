"""Runs a command under Nsight Systems (the nsys on PATH) and exports its report as a sqlite database. All waits are
bounded.

On a CPU everything is captured, and the marks of the ranks say what belongs to the run. On a GPU the capture range is
the stretch from cudaProfilerStart to cudaProfilerStop. Children must be spawned, never forked. Old releases write
`.qdstrm` and leave the import to `QdstrmImporter`, which Debian puts where nsys does not look; new ones write
`.nsys-rep` at once.
"""

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from shardproof.harness.errors import MachineError

EXPORT_LIMIT_S = 120.0


def nsys_path() -> Path | None:
    """The path of nsys, None if it is not installed."""
    found = shutil.which("nsys")
    return Path(found) if found else None


def export_report(nsys: Path, report: Path) -> Path:
    """The database of a report, named without its suffix, that nsys has finished or left raw. Raises MachineError."""
    folder = report.parent
    finished = report.with_suffix(".nsys-rep")
    raw = report.with_suffix(".qdstrm")
    if not finished.exists() and raw.exists():
        importer = next(_importers(nsys), None)
        if importer is None:
            raise nsys_error(f"{nsys} wrote {raw.name}, and QdstrmImporter, which reads it, was not found beside it")
        run_logged([str(importer), "-i", str(raw), "-o", str(finished)], folder, EXPORT_LIMIT_S)
        raw.unlink()
    if not finished.exists():
        raise nsys_error(f"{nsys} wrote no report")
    database = report.with_suffix(".sqlite")
    options = ["--type=sqlite", "--force-overwrite=true", f"--output={database}", str(finished)]
    run_logged([str(nsys), "export", *options], folder, EXPORT_LIMIT_S)
    if not database.exists():
        raise nsys_error(f"{nsys} exported no database from {finished.name}")
    return database


def _importers(nsys: Path) -> Iterator[Path]:
    """QdstrmImporter on PATH or beside any of the places that the link `nsys` leads through."""
    if found := shutil.which("QdstrmImporter"):
        yield Path(found)
    place = nsys
    for _link in range(8):
        yield from place.parent.parent.glob("*/QdstrmImporter")
        yield from place.parent.parent.glob("lib/nsight-systems/*/QdstrmImporter")
        if not place.is_symlink():
            return
        place = place.parent / os.readlink(place)


def run_to_end(words: Sequence[str], log: Path, limit_s: float, environment: Mapping[str, str] | None = None) -> int:
    """The exit status of a program whose output goes to a log. If it takes too long, all that it started is killed.

    Then it raises subprocess.TimeoutExpired; OSError if it cannot be started.
    """
    with log.open("ab") as output:
        running = subprocess.Popen(
            words,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            env=None if environment is None else dict(environment),
            start_new_session=True,  # so that nothing that it started outlives it
        )
    try:
        return running.wait(limit_s)
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()


def run_logged(
    words: Sequence[str], folder: Path, limit_s: float, environment: Mapping[str, str] | None = None
) -> None:
    """Run a tool to its end, with its output in `folder`/nsys.log. Raises MachineError if it fails."""
    log, name = folder / "nsys.log", Path(words[0]).name
    try:
        status = run_to_end(words, log, limit_s, environment)
    except subprocess.TimeoutExpired as problem:
        raise nsys_error(f"{name} did not end within {limit_s:.0f} s; {log} has its words") from problem
    except OSError as problem:
        raise nsys_error(f"{words[0]} cannot be run ({problem.strerror or problem})") from problem
    if status != 0:
        lines = log.read_text(errors="replace").strip().splitlines()
        last = f": {lines[-1].strip()}" if lines else ""
        raise nsys_error(f"{name} ended with status {status}{last}")


def nsys_error(why: str) -> MachineError:
    """The error of an nsys that is missing or does not work."""
    return MachineError(f"witness nsys is missing: {why}")


REPORT = "nsys"


def command_under_nsys(nsys: str, report: Path, program: Sequence[str], *, device: str = "cpu") -> list[str]:
    """The command line that runs a program under nsys and writes `report` (without its suffix)."""
    quiet = ["--sample=none", "--cpuctxsw=none", "--force-overwrite=true", f"--output={report}"]
    if device == "cpu":
        return [nsys, "profile", "--trace=nvtx", *quiet, *program]
    capture = ["--capture-range=cudaProfilerApi", "--capture-range-end=stop"]
    return [nsys, "profile", "--trace=cuda,nvtx", *capture, *quiet, *program]


def on_gpus() -> str:
    """Command of `--device cuda --profile nsys` on a node with GPUs, where kernels are in the timeline too."""
    program = ["python", "-m", "shardproof.harness.witnesses.measured", "FOLDER"]
    return (
        f"on a GPU node the session is: {shlex.join(command_under_nsys('nsys', Path(REPORT), program, device='cuda'))}"
    )


def database_of(
    program: Sequence[str], folder: Path, *, device: str, timeout_s: float, environment: Mapping[str, str]
) -> Path:
    """Run the program under nsys and export the report. Raises MachineError with one sentence if that fails."""
    nsys = nsys_path()
    if nsys is None:
        raise nsys_error("nsys is not on PATH (Debian: nsight-systems in non-free; NVIDIA: nsight-systems-cli)")
    report = folder / REPORT
    run_logged(command_under_nsys(str(nsys), report, program, device=device), folder, timeout_s, environment)
    return export_report(nsys, report)
