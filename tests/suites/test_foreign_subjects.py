"""Foreign systems as subjects of their own words and truths: the quick cells of the matrix `bench/systems.txt`.

The subjects of `shardproof new-subject` are run in tests/reports/commands/test_names.py. Defects of these systems:
FINDINGS.md has every script of docs/findings, and each prints what the page says; every command of docs/megatron.md.
"""

import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from bench import systems
from bench.systems import CHECKS, NOT_RUN, Cell, System, read_cells
from shardproof.harness.engines.engine import Engine
from shardproof.harness.engines.processes.forked.pool import PoolEngine
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.running.proof import prove
from shardproof.harness.running.result import CaseResult
from shardproof.harness.subject import case_of, resolve_subject
from shardproof.harness.verdicts.verdict import FAIL, PASS
from shardproof.suites.subjects import two_d
from tests import ROOT
from tests.deep import deep
from tests.harness.command_line import CommandLine

CELLS = [cell for cell in read_cells() if cell.expected == PASS and not cell.system.python]
CHECKOUTS = {cell.subject: cell.system.checkout for cell in CELLS if cell.system.checkout}
FIRST_PACKAGES = {cell.subject: cell.system.packages[0].partition("-")[0] for cell in CELLS}
NEEDS = {subject: package for subject, package in FIRST_PACKAGES.items() if package != "torch"}
ELSEWHERE = [one for one in dict.fromkeys(cell.system for cell in read_cells()) if one.python and not one.is_here]
PEERS = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]
DEAR = {
    "tp=2 dp=2 sp=true loss_parallel=true": "ten CPU seconds: two_d is proved without FSDP2, and on processes",
    "dp=4 hook=fp16_compress dtype=float32": "seven CPU seconds: ddp is proved without the hook",
    "tp=2 dp=3 steps=1": "twelve CPU seconds: Muon is proved by hand, fsdp2 on processes",
    "dp=3 data=fsdp2 compile=aot_eager": "six CPU seconds: tests/harness/threads/test_compiled_ranks.py has its like",
}
"""Case of a quick cell -> why it runs only in the profile `deep`."""


def marks_of(cell: Cell) -> Iterator[pytest.MarkDecorator]:
    """What a cell needs, and whether it is dear."""
    if cell.subject in NEEDS:
        yield from PEERS
    if cost := DEAR.get(cell.case):
        yield pytest.mark.deep(cost)


def quick(engine: str) -> list[Any]:
    """The quick cells of the matrix that run on this engine."""
    return [
        pytest.param(f"{cell.subject}:subject", cell.case, marks=[*marks_of(cell)])
        for cell in CELLS
        if cell.quick and cell.engine == engine
    ]


LATE = pytest.param("mcore:subject", "tp=2", marks=[*PEERS, pytest.mark.deep("ten CPU seconds: every rank imports it")])


def proved(name: str, text: str, engine: Engine) -> CaseResult:
    """The case of a subject of `suites.subjects`, which passes. Skips the test where its package is not installed."""
    module = name.partition(":")[0]
    if module in NEEDS and find_spec(NEEDS[module]) is None:
        pytest.skip(f"needs {NEEDS[module]} of the extra `peers`")
    if (variable := CHECKOUTS.get(module, "")) and variable not in os.environ:
        pytest.skip(f"{variable}: names no checkout")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if module in NEEDS else "error")  # other packages' own
        # Dynamo looks at it and ignores the warning, in a way that holds for one thread of a process alone.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
        given = resolve_subject(f"shardproof.suites.subjects.{name}")
        result = prove(case_of(text, given), given, engine)
    assert result.verdict == PASS, [verdict.message for verdict in result.verdicts if verdict.verdict != PASS]
    return result


@pytest.mark.parametrize(("name", "text"), quick("inproc"))
def test_unmodified_systems_are_right(name: str, text: str) -> None:
    with InprocEngine() as threads:
        result = proved(name, text, threads)
    assert {verdict.check for verdict in result.verdicts} >= CHECKS
    assert result.events


@pytest.mark.slow
@pytest.mark.parametrize(("name", "text"), [*quick("pool"), LATE])
def test_on_processes_too(pool: PoolEngine, name: str, text: str) -> None:
    proved(name, text, pool)


@pytest.mark.slow
@pytest.mark.parametrize("system", [*chain.from_iterable(deep(f"{NOT_RUN}: {one.name}", one) for one in ELSEWHERE)])
def test_systems_of_another_python(system: System, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert systems.main(["--quick", "--only", system.name, "--out", str(tmp_path / "page.md")]) == 0
    if NOT_RUN in (told := capsys.readouterr().out):
        pytest.skip(told)


BUGS = [
    ("looped", "pp=2", "(losses).mean()", "(losses).sum()"),
    ("ulysses", "cp=2", '[mesh.get_local_rank("cp")]', "[0]"),
    ("deepspeed", "dp=3 zero=1", "engine, step, micro, dp_rank)", "engine, step, micro, 0)"),
]
"""Subject, case, and a line of it as a bug: losses summed, a part of the sequence twice, samples of another rank."""


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
    given = resolve_subject(f"broken_{name}:subject")
    with InprocEngine() as threads:
        result = prove(case_of(text, given), given, threads, explain=False)
    assert {one.check for one in result.verdicts if one.verdict == FAIL} & {"forward", "parameter_gradients"}


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@pytest.mark.deep("40 CPU seconds")
def test_a_defect_of_transformers_is_found_in_its_module_by_one_command_and_reproduced(
    shardproof_here: CommandLine,
) -> None:
    pytest.importorskip("transformers", reason="needs the extra `peers`")
    command = ("run", "tp=2 micro=2", "--subject", "shardproof.suites.subjects.qwen3:accumulating")
    status, out, _ = shardproof_here(*command, "--emit-repro", "found.py")
    assert status == 1 and "\nfirst:  grad_sync of model.layers.0.self_attn.k_norm in step 0: grad/" in out
    repeat = next(line.partition("repeat: ")[2] for line in out.splitlines() if line.startswith("repeat: "))
    assert shlex.split(repeat) == ["shardproof", *command]
    done = subprocess.run([sys.executable, "found.py"], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "reproduced"), done.stderr
    assert done.stdout.startswith("grad/model.layers.0.self_attn.k_norm.weight: ")


PAGE = (ROOT / "FINDINGS.md").read_text()
SCRIPTS = ROOT / "docs" / "findings"
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
PACKAGES = {"megatron": "megatron.core"} | {name: name for name in ("deepspeed", "transformers", "torchtitan")}
"""Packages by the first word of a script's name."""
FINDINGS = [(command, printed) for command, printed in re.findall(r"^    \$ (.+)\n((?:    .+\n)+)", PAGE, re.MULTILINE)]


def close(told: str, printed: str) -> bool:
    """Whether the words are the same, and the numbers too but for rounding."""
    one, other = ([float(number) for number in NUMBER.findall(text)] for text in (told, printed))
    return NUMBER.sub("#", told) == NUMBER.sub("#", printed) and one == pytest.approx(other, rel=1e-3, abs=2e-6)


def script_of(command: str) -> Path:
    return next(ROOT / word for word in shlex.split(command) if word.endswith(".py"))


def test_every_finding_has_its_script_every_script_its_finding_and_other_numbers_are_seen() -> None:
    assert {script_of(command) for command, _ in FINDINGS} == set(SCRIPTS.glob("*.py"))
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        if section.startswith(("Limits", "Seen")):
            continue
        title = section.splitlines()[0]
        for needed in ("Newest release that shows it:", "Upstream:", "    $ ", "Issue:"):
            assert needed in section, f"{title}: {needed}"
    ours = r"^\s*(?:from|import) shardproof\b"
    for path in SCRIPTS.glob("*.py"):
        assert not re.search(ours, path.read_text(), re.MULTILINE), f"{path.name} needs shardproof"
    assert close("norm 1.0000, right 2", "norm 1.0001, right 2")
    assert not close("norm 1.0000, right 2", "norm 1.1000, right 2")
    assert not close("norm 1.0000, right 2", "norm 1.0000, wrong 2")


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.deep("10 to 30 CPU seconds each: packages are imported on every rank")
@pytest.mark.parametrize(("command", "printed"), FINDINGS, ids=[script_of(command).name for command, _ in FINDINGS])
def test_a_finding_is_there_as_the_page_says(command: str, printed: str) -> None:
    words = shlex.split(command)
    settings = {name: os.environ.get(name) for name, equals, _ in (word.partition("=") for word in words) if equals}
    if missing := [name for name, value in settings.items() if value is None]:
        pytest.skip(f"{missing[0]}: names no checkout")
    script = script_of(command)
    package = script.name.partition("_")[0]
    if package in PACKAGES and find_spec(package) is None:
        pytest.skip(f"needs {package}")
    begin = next(place for place, word in enumerate(words) if word.endswith(".py"))
    ran = [sys.executable, str(script), *words[begin + 1 :]]
    ended = subprocess.run(ran, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    told = [line.strip() for line in printed.splitlines()]
    version = next((line for line in told if re.match(r"[\w-]+ \d+\.\d+\.\d+", line)), "")
    found = ended.stdout.splitlines()
    if version and (named := version.partition(",")[0]) not in ended.stdout:
        pytest.skip(f"the page is about {named}")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    lost = [line for line in told if not any(close(line, one.strip()) for one in found)]
    assert lost == [], ended.stdout


DEFECTS = [(cell.subject, cell.case, cell.needle) for cell in read_cells() if cell.feature == "as in megatron.md"]
"""Subject, case and module of every command of docs/megatron.md."""


def test_the_page_has_every_known_defect_of_megatron() -> None:
    assert len(DEFECTS) == 10
    assert {subject for subject, _, _ in DEFECTS} == {"mcore_experts", "mcore_latent", "mcore_heads"}


@pytest.mark.peers
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.deep("30 CPU seconds each: what is wrong is looked at on several ranks, in several dtypes")
@pytest.mark.parametrize(("subject", "case", "module"), DEFECTS)
def test_a_known_defect_of_megatron_is_found_in_its_module_by_one_command(
    subject: str, case: str, module: str, shardproof_here: CommandLine
) -> None:
    pytest.importorskip("megatron.core", reason="needs the extra `peers`")
    if not (found := importlib.metadata.version("megatron-core")).startswith("0.16."):
        pytest.skip(f"megatron-core {found}: the page is about 0.16")
    status, out, _ = shardproof_here("run", case, "--subject", f"shardproof.suites.subjects.{subject}:subject")
    what, first = (next(line for line in out.splitlines() if line.startswith(word)) for word in ("what:", "first:"))
    assert status == 1 and (module in what or module in first), out
