"""Every command on every system of `suites.subjects`: in process, on processes, faults, a gate, a bug and its script.

Left to `--hypothesis-profile deep`: an hour of one core. Otherwise test_foreign_subjects.py and test_new_subject.py run
each in process, and some on processes.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest

from reports.commands import cli
from tests import ROOT

pytestmark = pytest.mark.deep("an hour for all of them")
ENGINE_THAT_WORKS = "--engine inproc"


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A subject, a case that it computes rightly, a line of its file, and that line as a bug that `shows` in a case."""

    name: str
    case: str
    right: str
    wrong: str
    options: tuple[str, ...] = ()
    needs: str = ""
    shows: str = ""

    @property
    def words(self) -> tuple[str, ...]:
        """The options of the command line that choose it."""
        return ("--subject", f"suites.subjects.{self.name}:subject", *self.options)


UNSUMMED = ("dist.all_reduce(tensor, group=group)", "pass")
SYSTEMS = (
    System(name="mlp", case="tp=2 dp=3", right=UNSUMMED[0], wrong=UNSUMMED[1]),
    System(name="mlp", case="tp=2 dp=3", right=UNSUMMED[0], wrong=UNSUMMED[1], options=("--truth", "alone")),
    System(name="dtensor", case="tp=2 dp=2", right=UNSUMMED[0], wrong=UNSUMMED[1]),
    System(name="fsdp2", case="dp=3", right="(case.micro * len(dp_ranks))", wrong="(case.micro * case.dp)"),
    System(name="ddp", case="dp=3", right="[dist.get_rank()]", wrong="[0]"),
    System(name="two_d", case="tp=2 dp=2 sp=true", right=".div_(case.dp)", wrong=""),
    System(name="hf", case="tp=2", right='"kind": "llama"', wrong='"kind": "qwen3"', needs="transformers"),
    System(
        name="qwen3",
        case="tp=2",
        right="if case.micro > 1",
        wrong="if case.micro > 2",
        shows="tp=2 micro=2",
        needs="transformers",
    ),
    System(
        name="megatron",
        case="tp=2",
        right="loss.backward()",
        wrong="(case.tp * loss).backward()",
        needs="megatron.core",
    ),
    System(
        name="mcore",
        case="tp=2 dp=2 sp=true llama=true",
        right="distributed.finalize_model_grads([model])",
        wrong="model.finish_grad_sync()",
        needs="megatron.core",
    ),
)


def parameters() -> list[object]:
    """The systems, with the marks of those that need other packages."""
    peers = (pytest.mark.peers, pytest.mark.filterwarnings("ignore"))
    names = [" ".join([one.name, *one.options]) for one in SYSTEMS]
    return [
        pytest.param(one, marks=peers if one.needs else (), id=name) for one, name in zip(SYSTEMS, names, strict=True)
    ]


def installed(system: System) -> None:
    if system.needs:
        with warnings.catch_warnings(action="ignore"):  # its own, at import
            pytest.importorskip(system.needs, reason="needs the extra `peers`")


@pytest.mark.slow
@pytest.mark.parametrize("system", parameters())
def test_every_command_of_a_right_and_a_wrong_subject(
    system: System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    installed(system)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")

    def run(*words: str) -> tuple[int, str]:
        capsys.readouterr()
        status, printed = cli.main(words), capsys.readouterr()
        return status, printed.out + printed.err

    assert run("run", system.case, *system.words)[0] == 0
    assert run("compare", "runs/latest", "--save-baseline", "main")[0] == 0
    assert run("run", system.case, *system.words, "--engine", "pool")[0] == 0
    assert run("compare", "main", "runs/latest", "--fail", "bytes:0", "--fail", "calls:0")[0] == 0
    status, out = run("run", system.case, *system.words, "--engine", "dry")
    assert status == 0 or ENGINE_THAT_WORKS in out, out
    status, out = run("faults", system.case, "--quick", *system.words)
    assert status == 0, out
    source = Path(importlib.util.find_spec(f"suites.subjects.{system.name}").origin).read_text()  # type: ignore
    assert source.count(system.right) == 1
    broken = f"broken_{system.name}_{len(system.options)}"
    Path(f"{broken}.py").write_text(source.replace(system.right, system.wrong))
    status, out = run(
        "run",
        system.shows or system.case,
        "--subject",
        f"{broken}:subject",
        *system.options,
        "--emit-repro",
        "found.py",
    )
    assert status == 1 and "\nwhat:   " in out and "\nrepeat: " in out, out
    script = subprocess.run([sys.executable, "found.py"], capture_output=True, text=True, timeout=300, check=False)
    assert (script.returncode, script.stdout.splitlines()[-1]) == (1, "reproduced"), script.stderr


@pytest.mark.slow
@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "xdist"])
@pytest.mark.parametrize("system", parameters())
def test_all_suites_on_it(system: System, workers: tuple[str, ...], tmp_path: Path) -> None:
    installed(system)
    command = [sys.executable, "-m", "pytest", "-q", "--pyargs", "suites", *system.words, *workers]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
