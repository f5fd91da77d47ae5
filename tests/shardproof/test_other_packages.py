"""A user's packages with the names of our folders: unharmed by the plugin; one sentence where ours are used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardproof import rooms

THEIRS = ("suites", "reports", "parallel")
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
    assert not {"harness", "reference", "torch", "numpy", "pandas", "matplotlib"} & {*sys.modules}
    assert pytestconfig.getoption("engine") == "torchrun" and pytestconfig.getoption("device") == "theirs"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's project."""
    for name in THEIRS:
        package(tmp_path / name)
    (tmp_path / "suites" / "test_theirs.py").write_text("def test_theirs(): pass\n")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_mine.py").write_text(TEST)
    return tmp_path


def package(place: Path) -> None:
    place.mkdir()
    (place / "__init__.py").touch()
    (place / "mine.py").write_text("OWNER = 'me'\n")


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command of this interpreter in the folder."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    environment["PYTHONPATH"] = str(rooms.HOME)
    command = [sys.executable, *words]
    return subprocess.run(
        command, check=False, cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


def test_an_unrelated_session_notices_nothing(folder: Path) -> None:
    done = python(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--engine", "torchrun", "test_mine.py")
    assert done.returncode == 0, done.stdout + done.stderr
    done = python(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--pyargs", "suites", "--device", "cpu")
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


def test_the_suites_in_the_place_of_others_are_one_sentence(folder: Path) -> None:
    (folder / "conftest.py").unlink()
    for name in ("reports", "parallel"):
        shutil.rmtree(folder / name)
    words = ("-m", "pytest", "-p", "no:cacheprovider", "--pyargs", "suites", "--subject", "mine:subject")
    done = python(folder, *words)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout + done.stderr
    assert done.stderr.strip().startswith(f"ERROR: package suites: {folder}/suites is found before {rooms.HOME}/suites")
    assert done.stderr.strip().count("\n") == 0


@pytest.mark.parametrize("words", [("show",), ("run", "mode=tp tp=2", "--subject", "mine:subject"), ("help", "case")])
def test_a_command_in_the_place_of_others_is_one_sentence(tmp_path: Path, words: tuple[str, ...]) -> None:
    package(tmp_path / "parallel")
    command = "import sys; sys.path.remove(''); from shardproof.__main__ import main; sys.exit(main())"
    for started in (("-m", "shardproof"), ("-c", command)):
        done = python(tmp_path, *started, *words)
        assert done.returncode == 2 and done.stdout == "", done.stdout + done.stderr
        first = f"shardproof: package parallel: {tmp_path}/parallel is found before {rooms.HOME}/parallel, which"
        assert done.stderr.startswith(first) and done.stderr.count("\n") == 1


def test_a_name_in_the_place_of_others_is_an_import_error(tmp_path: Path) -> None:
    package(tmp_path / "reference")
    done = python(tmp_path, "-c", "import shardproof\ntry: shardproof.Case\nexcept ImportError as e: print(e)")
    assert done.stdout.startswith(f"package reference: {tmp_path}/reference is found before {rooms.HOME}/reference")


def test_a_folder_without_python_is_no_package(tmp_path: Path) -> None:
    for name in rooms.ROOMS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "of-march.html").touch()
    rooms.check(str(tmp_path))
    done = python(tmp_path, "-m", "shardproof", "help", "case")
    assert done.returncode == 0, done.stderr


def test_ours_are_ours() -> None:
    assert [rooms.foreign(room) for room in rooms.ROOMS] == [""] * len(rooms.ROOMS)


def test_a_wrong_option_of_a_session_loads_nothing_slow(tmp_path: Path) -> None:
    program = """import sys, pytest
status = pytest.main(["-p", "no:cacheprovider", "--pyargs", "suites.test_forward", *sys.argv[1:]])
sys.exit(f"{int(status)} {[name for name in ('torch', 'pandas', 'numpy') if name in sys.modules]}")"""
    for words in (("--case", "mode=unknown"), ("--modes", "unknown"), ("--worlds", "1"), ("--engine", "steam")):
        done = python(tmp_path, "-c", program, *words)
        assert done.stderr.endswith("\n4 []\n"), done.stdout + done.stderr
        assert f"ERROR: {'case ' if words[0] == '--case' else words[0][2:] + '='}" in done.stderr
