"""Runs a command under Nsight Systems, which leaves a report.

On a CPU everything is captured and the marks of the ranks say what belongs to the run.
On a GPU the capture range is the stretch between cudaProfilerStart and Stop. Children must be spawned, never forked.
"""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from shardproof.harness.traces.nsys_export import export_report, nsys_error, nsys_path, run_logged

REPORT = "nsys"


def command(nsys: str, report: Path, program: Sequence[str], *, device: str = "cpu") -> list[str]:
    """The command line that runs a program under nsys and writes `report` (without its suffix)."""
    quiet = ["--sample=none", "--cpuctxsw=none", "--force-overwrite=true", f"--output={report}"]
    if device == "cpu":
        return [nsys, "profile", "--trace=nvtx", *quiet, *program]
    capture = ["--capture-range=cudaProfilerApi", "--capture-range-end=stop"]
    return [nsys, "profile", "--trace=cuda,nvtx", *capture, *quiet, *program]


def on_gpus() -> str:
    """Command of `--device cuda --profile nsys` on a node with GPUs, where kernels are in the timeline too."""
    program = ["python", "-m", "shardproof.harness.witnesses.measured", "FOLDER"]
    return f"on a GPU node the session is: {shlex.join(command('nsys', Path(REPORT), program, device='cuda'))}"


def database_of(
    program: Sequence[str], folder: Path, *, device: str, timeout_s: float, environment: Mapping[str, str]
) -> Path:
    """Run the program under nsys and export what was seen. Raises MachineError with one sentence when that fails."""
    nsys = nsys_path()
    if nsys is None:
        raise nsys_error("nsys is not on PATH (Debian: nsight-systems in non-free; NVIDIA: nsight-systems-cli)")
    report = folder / REPORT
    run_logged(command(str(nsys), report, program, device=device), folder, timeout_s, environment)
    return export_report(nsys, report)
