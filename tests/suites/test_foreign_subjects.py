"""Foreign systems as subjects of their own words and truths: the quick cells of the matrix `bench/systems.txt`.

The subjects of `shardproof new-subject` are run in tests/reports/commands/test_names.py.
"""

import importlib.util
import os
import shlex
import subprocess
import sys
import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench import systems
from bench.cells import System, cells
from bench.systems import CHECKS, NOT_RUN
from harness.checking.evidence import FAIL, PASS
from harness.engines.engine import Engine
from harness.engines.processes.forked.pool import PoolEngine
from harness.engines.threads.inproc import InprocEngine
from harness.running.proof import prove
from harness.running.result import CaseResult
from harness.subject import case_of, named
from reports.commands import cli
from suites.subjects import two_d
from tests.deep import deep

CELLS = [cell for cell in cells() if cell.expected == PASS and not cell.system.python]
CHECKOUTS = {cell.subject: cell.system.checkout for cell in CELLS if cell.system.checkout}
NEEDS = {cell.subject: cell.system.packages[0].partition("-")[0] for cell in CELLS}
NEEDS = {subject: package for subject, package in NEEDS.items() if package != "torch"}
ELSEWHERE = [one for one in dict.fromkeys(cell.system for cell in cells()) if one.python and not one.is_here]
PEERS = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]


def quick(engine: str) -> list[tuple[str, str]]:
    """The quick cells of the matrix that run on this engine."""
    return [(f"{cell.subject}:subject", cell.case) for cell in CELLS if cell.quick and cell.engine == engine]


LATE = pytest.param("mcore:subject", "tp=2", marks=[*PEERS, pytest.mark.deep("ten CPU seconds: every rank imports it")])


def proved(name: str, text: str, engine: Engine) -> CaseResult:
    """The case of a subject of `suites.subjects`. Skips the test where its package is not installed."""
    module = name.partition(":")[0]
    if module in NEEDS and importlib.util.find_spec(NEEDS[module]) is None:
        pytest.skip(f"needs {NEEDS[module]} of the extra `peers`")
    if (variable := CHECKOUTS.get(module, "")) and variable not in os.environ:
        pytest.skip(f"{variable}: names no checkout")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if module in NEEDS else "error")  # other packages' own
        given = named(f"suites.subjects.{name}")
        return prove(case_of(text, given), given, engine)


def of_peers(cases: list[tuple[str, str]]) -> list[Any]:
    return [pytest.param(*case, marks=PEERS if case[0].partition(":")[0] in NEEDS else ()) for case in cases]


@pytest.mark.parametrize(("name", "text"), of_peers(quick("inproc")))
def test_unmodified_systems_are_right(name: str, text: str) -> None:
    with InprocEngine() as threads:
        result = proved(name, text, threads)
    assert result.verdict == PASS, [verdict.message for verdict in result.verdicts if verdict.verdict != PASS]
    assert {verdict.check for verdict in result.verdicts} >= CHECKS
    assert result.events


@pytest.mark.slow
@pytest.mark.parametrize(("name", "text"), [*of_peers(quick("pool")), LATE])
def test_on_processes_too(pool: PoolEngine, name: str, text: str) -> None:
    result = proved(name, text, pool)
    assert result.verdict == PASS, [verdict.message for verdict in result.verdicts if verdict.verdict != PASS]


@pytest.mark.slow
@pytest.mark.parametrize("system", [*chain.from_iterable(deep(f"{NOT_RUN}: {one.name}", one) for one in ELSEWHERE)])
def test_systems_of_another_python(system: System, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert systems.main(["--quick", "--only", system.name, "--out", str(tmp_path / "page.md")]) == 0
    if NOT_RUN in (told := capsys.readouterr().out):
        pytest.skip(told)


BUGS = [
    ("hf", "tp=2 dp=2 micro=1 steps=1", "meshes), [dp_rank])", "meshes), [0])"),
    ("hsdp", "dp=4 replicas=2", "[dist.get_rank()]", "[0]"),
    ("looped", "pp=2", "(losses).mean()", "(losses).sum()"),
    ("autotp", "tp=2 dp=2", "loss_of(case, engine, step, micro, dp_rank)", "loss_of(case, engine, step, micro, 0)"),
    ("ulysses", "cp=2", '[mesh.get_local_rank("cp")]', "[0]"),
    ("deepspeed", "dp=3 zero=1", "engine, step, micro, dp_rank)", "engine, step, micro, 0)"),
]
"""Subject, case, and a line of it as a bug: samples of another rank, losses summed, a part of the sequence twice."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "text", "right", "wrong"), BUGS)
def test_a_bug_in_a_system_is_found(
    name: str, text: str, right: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(NEEDS.get(name, "torch"), reason="needs the extra `peers`")
    source = (Path(two_d.__file__).parent / f"{name}.py").read_text()
    assert source.count(right) == 1
    (tmp_path / f"broken_{name}.py").write_text(source.replace(right, wrong))
    monkeypatch.syspath_prepend(tmp_path)
    given = named(f"broken_{name}:subject")
    with InprocEngine() as threads:
        result = prove(case_of(text, given), given, threads)
    assert {one.check for one in result.verdicts if one.verdict == FAIL} & {"forward", "parameter_gradients"}


class Extra:
    """A subject with one call more, which changes no result."""

    def __init__(self, right: Any) -> None:
        vars(self).update(vars(right))
        self.right = right

    def __call__(self, case: Any, device: torch.device) -> Any:
        outcome = self.right(case, device)
        dist.all_reduce(outcome["loss/0"].clone())
        return outcome


extra = Extra(two_d.subject)


def test_a_stored_ledger_is_a_gate_that_one_call_more_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    case = "tp=2 sp=true steps=1 micro=1"
    for name, status in (("suites.subjects.two_d:subject", 0), (f"{__name__}:extra", 1)):
        assert cli.main(["run", case, "--subject", name]) == 0
        if not status:
            assert cli.main(["compare", "runs/latest", "--save-baseline", "main"]) == 0
        assert cli.main(["compare", "main", "runs/latest", "--fail", "calls:0", "--fail", "bytes:0"]) == status
    assert "breach: calls:0: tp metric outside modules: new all_reduce (0 -> 1 calls)" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("script", deep("20 CPU seconds", "", "found.py"))
def test_a_defect_of_transformers_is_found_in_its_module_by_one_command_and_reproduced(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="needs the extra `peers`")
    monkeypatch.chdir(tmp_path)
    command = ["run", "tp=2 micro=2", "--subject", "suites.subjects.qwen3:accumulating"]
    assert cli.main([*command, "--when", "0", *(["--emit-repro", script] if script else [])]) == 1
    out = capsys.readouterr().out
    assert "\nfirst:  grad_sync of model.layers.0.self_attn.k_norm in step 0: grad/" in out
    repeat = next(line.partition("repeat: ")[2] for line in out.splitlines() if line.startswith("repeat: "))
    assert shlex.split(repeat) == ["shardproof", *command]
    if script:
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, check=False)
        assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "reproduced"), done.stderr
        assert done.stdout.startswith("grad/model.layers.0.self_attn.k_norm.weight: ")
