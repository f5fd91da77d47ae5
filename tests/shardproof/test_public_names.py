"""`import shardproof`: its names are there, typed, imported when used; folders of a user may have the names of ours."""

import ast
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import shardproof
from tests import INSTALLED, ROOT

HEAVY = {"torch", "numpy", "pandas", "matplotlib", "rich", "hypothesis", "pytest"}
TINY = "mode=tp tp=2 layers=1 hidden=16 heads=2 vocab=24 seq=4 micro=1 steps=1"
LIGHT = ("Case", "RequestError", "Shard", "ShardproofError", "phase", "region")


def typed_names() -> dict[str, str]:
    """Names that type checkers read: name -> module:attribute, of the imports under TYPE_CHECKING."""
    tree = ast.parse(Path(str(shardproof.__file__)).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    return {
        alias.asname or alias.name: f"{node.module}:{alias.name}"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_every_name_is_there_and_typed() -> None:
    assert sorted(typed_names()) == shardproof.__all__ == dir(shardproof)
    for name, place in typed_names().items():
        module, _, attribute = place.partition(":")
        assert getattr(shardproof, name) is getattr(import_module(module), attribute), name
        assert vars(shardproof)[name] is getattr(shardproof, name), "looked up once"
    with pytest.raises(AttributeError, match="'shardproof' has no attribute 'absent'; it has Case, RequestError"):
        getattr(shardproof, "absent")  # noqa: B009
    assert not hasattr(shardproof, "__path") and not hasattr(shardproof, "no_such_name")


LOADED = """
def loaded():
    inner = {name for name in sys.modules if name in INNER}
    print(*{name.partition('.')[0] for name in sys.modules if not name.startswith("shardproof")}, *inner)
import sys, shardproof; dir(shardproof); loaded()
import shardproof.__main__; loaded()
import shardproof.pytest_plugin; loaded()
for name in LIGHT: getattr(shardproof, name)
loaded()
"""


def test_importing_it_loads_nothing_else_and_words_need_no_torch() -> None:
    """The top-level packages that a fresh interpreter has loaded, after each step of a program."""
    inner = tuple(f"shardproof.{folder}" for folder in INSTALLED)
    command = [sys.executable, "-c", LOADED.replace("LIGHT", str(LIGHT)).replace("INNER", str(inner))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    alone, as_program, plugin, words = ({*HEAVY, *inner} & {*line.split()} for line in done.stdout.splitlines())
    assert alone == as_program == set()
    assert plugin == {"pytest"} and not words & {"torch", "numpy", "pandas"}


def test_a_case_is_proved_and_run_by_words(tmp_path: Path) -> None:
    result = shardproof.prove(TINY, "shardproof.parallel.subject:subject")
    assert result.verdict == "pass" and result.events
    assert (
        shardproof.prove(shardproof.Case.parse(TINY), "shardproof.parallel.subject:subject", "dry").text == result.text
    )
    done = shardproof.run([TINY], "shardproof.parallel.subject:subject", out=tmp_path)
    assert done.exit_status == 0
    assert list(shardproof.headline(shardproof.load(done.path))["verdict"]) == ["pass"]
    with pytest.raises(shardproof.RequestError, match="mode=zz: is not a known word"):
        shardproof.prove("mode=zz", "shardproof.parallel.subject:subject")
    with pytest.raises(shardproof.RequestError, match="engine=steam: is not a known engine"):
        shardproof.run([TINY], "shardproof.parallel.subject:subject", engine="steam", out=tmp_path)


ENDING = """
import gc, sys
from shardproof.__main__ import main
frozen, sys.argv = [], ["shardproof", "--version"]
gc.freeze = lambda: frozen.append("frozen")
bound = [type("nb_type_0", (type,), {"__module__": "nanobind"})("Block", (), {})]
ends = [main(), *frozen]
bound.clear()
gc.collect()
ends += [main(), *frozen]
sys.exit(ends != [0, 0, "frozen"])
"""


def test_what_is_left_is_collected_where_nanobind_would_report_it(tmp_path: Path) -> None:
    """torch 2.15 loads triton, whose types are nanobind's: 27 lines on standard error after each verdict."""
    passed(tmp_path, "-c", ENDING)


CONFTEST = """
def pytest_addoption(parser):
    for word in ("subject", "modes", "case", "engine", "device", "faults", "worlds"):
        parser.addoption(f"--{word}", default="theirs")
"""
TEST = """
import sys
import suites.mine, reports.mine, parallel.mine

def test_nothing_of_ours_is_loaded(pytestconfig):
    assert pytestconfig.pluginmanager.has_plugin("shardproof"), "the plugin is installed here"
    assert {suites.mine.OWNER, reports.mine.OWNER, parallel.mine.OWNER} == {"me"}
    assert not {"shardproof.harness", "torch", "numpy", "pandas", "matplotlib"} & {*sys.modules}
    assert pytestconfig.getoption("engine") == "torchrun" and pytestconfig.getoption("device") == "theirs"
"""


def package(place: Path) -> None:
    place.mkdir()
    (place / "__init__.py").touch()
    (place / "mine.py").write_text("OWNER = 'me'\n")


def python(folder: Path, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """A command of this interpreter in the folder."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    environment["PYTHONPATH"] = str(ROOT)
    options: dict[str, Any] = {"cwd": folder, "env": environment, "input": stdin, "timeout": 200}
    return subprocess.run([sys.executable, *words], check=False, capture_output=True, text=True, **options)


def passed(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command that ends with exit status 0."""
    done = python(folder, *words)
    assert done.returncode == 0, (words, done.stdout + done.stderr)
    return done


def test_an_unrelated_session_notices_nothing(tmp_path: Path) -> None:
    for name in ("suites", "reports", "parallel"):
        package(tmp_path / name)
    (tmp_path / "suites" / "test_theirs.py").write_text("def test_theirs(): pass\n")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_mine.py").write_text(TEST)
    for words in (("--engine", "torchrun", "test_mine.py"), ("--pyargs", "suites", "--device", "cpu")):
        assert "1 passed" in passed(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words).stdout


SUBJECT = """
import torch, torch.distributed as dist
import bench.mine, bugs.mine, harness.errors, parallel.mine, suites.mine
import reports.mine as mine
from parallel import deeper

def subject(case, device):
    from reference.mine import OWNER
    owners = {bench.mine.OWNER, bugs.mine.OWNER, harness.errors.OWNER, parallel.mine.OWNER, suites.mine.OWNER}
    assert owners | {OWNER, mine.OWNER, deeper.OWNER} == {"me"}
    local = torch.ones((), dtype=torch.float64) / dist.get_world_size()
    dist.all_reduce(local)
    return {"loss/0": local}

subject.words, subject.truth, subject.cases = {"width": 4}, "alone", ("tp=2 steps=1",)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's folder with a package of every name of ours, and a subject that imports them."""
    for name in (*INSTALLED, "bench"):
        package(tmp_path / name)
    (tmp_path / "harness" / "errors.py").write_text("OWNER = 'me'\n")
    (tmp_path / "parallel" / "deeper.py").write_text("from parallel.mine import OWNER\n")
    (tmp_path / "parallel" / "named.py").write_text("from my_subject import subject\n")
    (tmp_path / "my_subject.py").write_text(SUBJECT)
    return tmp_path


def test_a_project_with_folders_of_our_names_is_proved_on_processes(project: Path) -> None:
    """On threads in a session of the suites below, and in a wheel in tests/project/test_installed.py."""
    words = ("run", "--subject", "parallel.named:subject", "--engine", "pool")
    assert " pass " in passed(project, "-m", "shardproof", *words).stdout


_CONSOLE = "import sys, pytest; del sys.path[0]; pytest.console_main()"
_ONE_CASE = (
    "-q",
    "-p",
    "no:cacheprovider",
    "--hypothesis-profile=one-case",
    "--pyargs",
    "shardproof.suites.test_forward",
)
SESSION = ("-c", _CONSOLE, *_ONE_CASE)
"""For the interpreter: a short session of the suites, begun as by the command `pytest`."""


@pytest.mark.deep("eight CPU seconds")
def test_such_a_project_is_tested(project: Path) -> None:
    """From the console; as `python -m pytest` in the recipe of tests/project/test_installed.py, in every profile."""
    (project / "conftest.py").write_text("import parallel.mine\nassert parallel.mine.OWNER == 'me'\n")
    assert "1 passed" in passed(project, *SESSION, "--subject=my_subject:subject").stdout


@pytest.mark.deep("ten CPU seconds each")
def test_profiled_and_launched_ranks_run_in_such_a_project(project: Path) -> None:
    profiled = ("-m", "shardproof", "run", "mode=tp tp=2 layers=1 seq=8", "--profile", "torch")
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "shardproof")
    launched = (*launcher, "run", "tp=2 steps=1", "--subject", "my_subject:subject", "--engine", "torchrun")
    for words in (profiled, launched):
        passed(project, *words)


PROGRAM = """
import harness.mine
import torch.distributed as dist
dist.init_process_group("gloo", rank=0, world_size=1, init_method="file://{store}")
import harness.errors, parallel.mine
assert parallel.mine.OWNER == harness.errors.OWNER == harness.mine.OWNER == "me"
dist.barrier()
"""


def test_a_program_of_such_a_project_is_recorded(project: Path) -> None:
    (project / "train.py").write_text(PROGRAM.format(store=project / "store"))
    done = passed(project, "-m", "shardproof", "record", "--", sys.executable, "train.py")
    assert "not recorded" not in done.stderr, done.stderr
    assert "train.py" in (project / "runs" / "latest" / "cases.jsonl").read_text()


def test_a_wrong_option_of_a_session_loads_nothing_slow(tmp_path: Path) -> None:
    program = """import sys, pytest
plain = ["-p", "no:cacheprovider", "--pyargs", "shardproof.suites.test_forward"]
ends = [int(pytest.main([*plain, *words.split()])) for words in sys.argv[1:]]
sys.exit(f"{ends} {[name for name in ('torch', 'pandas', 'numpy') if name in sys.modules]}")"""
    done = python(tmp_path, "-c", program, "--case mode=unknown", "--modes unknown", "--worlds 1", "--engine steam")
    assert done.stderr.endswith("\n[4, 4, 4, 4] []\n"), done.stdout + done.stderr
    for begin in ("case ", "modes=", "worlds=", "engine="):
        assert done.stderr.count(f"ERROR: {begin}") == 1, done.stderr
