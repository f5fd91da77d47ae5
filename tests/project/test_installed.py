"""Shardproof as users install it: docs/ci.md as it stands, in an empty repository, and beside folders of our names.

The steps of the recipe run as GitHub runs them, each by `bash -e`. The wheel of this tree is installed into a virtual
environment that sees what is installed here, but for shardproof: nothing is downloaded.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import FOLDERS, INSTALLED, ROOT
from tests.deep import deep
from tests.project.test_documents import FEW
from tests.shardproof.test_public_names import SESSION

LONGEST_S = 400
WORDS = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet")
"""Words for pip: it installs from the sources here, and downloads nothing."""


def copied(source: Path) -> Path:
    """A copy of what shardproof is made of."""
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    return source


def built(folder: Path) -> Path:
    """The wheel of this tree, built in this folder from a copy."""
    command = [sys.executable, "-m", "pip", "wheel", *WORDS, "-w", str(folder / "wheel"), str(copied(folder / "tree"))]
    subprocess.run(command, check=True, timeout=LONGEST_S)
    (found,) = (folder / "wheel").iterdir()
    return found


def fresh_environment(folder: Path) -> Path:
    """A virtual environment with pip and all that is installed here, but for shardproof.

    Hypothesis reads the constants of every module outside of a `site-packages`: of torch, half a minute.
    """
    venv.create(folder, symlinks=True)
    seen = folder / "seen" / "site-packages"
    seen.mkdir(parents=True)
    for place in dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")):
        for path in Path(place).iterdir():
            if "shardproof" not in path.name:
                (seen / path.name).symlink_to(path)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (folder / "lib" / version / "site-packages" / "seen.pth").write_text(f"{seen}\n")
    return folder


def files_below(face: str, *folders: str) -> set[str]:
    """The files of the package `face`, where it lies in a wheel, and of the folders that are links in it."""
    paths = {path.relative_to(ROOT / face) for path in (ROOT / face).iterdir() if path.is_file()}
    paths |= {path.relative_to(ROOT) for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()}
    return {path.as_posix() for path in paths if "__pycache__" not in path.parts}


PAGE, RECIPE = ROOT / "docs" / "ci.md", ROOT / "docs" / "shardproof.yml"
STATED: dict[str, Any] = yaml.safe_load(RECIPE.read_text())
ADAMW_REFUSED = "case.world_size != 2 or case.optimizer == 'adamw'"
"""The condition for what the page's subject refuses, with one of its two default cases in it."""


Step = Callable[..., subprocess.CompletedProcess[str]]


def job(folder: Path, wheel: Path, environment: Path) -> tuple[list[str], Step]:
    """The names of the steps of the page's job that are commands, and what runs one in a repository, by its name.

    The repository variable of shardproof is this wheel; the steps use this virtual environment.
    """
    of_repository = {"${{ vars.SHARDPROOF }}": str(wheel)}
    env = {name: of_repository.get(text, "" if "vars." in text else text) for name, text in STATED["env"].items()}
    env |= {name: os.environ[name] for name in ("HOME", "TMPDIR", "LD_LIBRARY_PATH") if name in os.environ}
    env |= {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_COMPILE": "1"}
    env |= {"PYTEST_ADDOPTS": FEW, "PYTEST_XDIST_AUTO_NUM_WORKERS": "0"}
    env |= {"PATH": os.pathsep.join([str(environment / "bin"), os.environ["PATH"]])}
    steps = {step["name"]: step["run"] for step in STATED["jobs"]["prove"]["steps"] if "run" in step}

    def run(name: str, **words: str) -> subprocess.CompletedProcess[str]:
        bash = ["bash", "--noprofile", "--norc", "-e", "-c", steps[name]]
        options: dict[str, Any] = {"cwd": folder, "env": env | words, "timeout": LONGEST_S}
        return subprocess.run(bash, capture_output=True, text=True, check=False, **options)

    return [*steps], run


def written_by_the_reader(folder: Path) -> None:
    """An empty repository, and what the page says to write there."""
    subprocess.run(["git", "init", "--quiet", folder], check=True)
    page = PAGE.read_text()
    ((example, name),) = re.findall(r"copy \[(examples/\w+\.py)\].*?to `([\w/]+\.py)`", page, flags=re.S)
    (folder / name).parent.mkdir()
    shutil.copy(PAGE.parent / example, folder / name)
    (folder / ".github" / "workflows").mkdir(parents=True)
    shutil.copy(RECIPE, folder / ".github" / "workflows")


def edited(text: str, old: str, new: str) -> str:
    """The text with `new` in place of `old`, which it holds once."""
    assert text.count(old) == 1
    return text.replace(old, new)


SUBJECT = """
import torch, torch.distributed as dist
from parallel.mine import OWNER

def subject(case, device):
    local = torch.ones((), dtype=torch.float64) / dist.get_world_size()
    dist.all_reduce(local)
    return {"loss/0": local if OWNER == "me" else None}

subject.words, subject.truth, subject.cases = {"width": 4}, "alone", ("tp=2 steps=1",)
"""
RUN = ("run", "--subject", "mine:subject", "--engine", "pool")


def with_folders_of_our_names(folder: Path) -> Path:
    """The folder; of these `parallel` is a package, the others hold notes, tables, pictures."""
    for name in (*INSTALLED, "bench"):
        (folder / name).mkdir(parents=True)
    (folder / "parallel" / "__init__.py").touch()
    (folder / "parallel" / "mine.py").write_text("OWNER = 'me'\n")
    return folder


@pytest.mark.slow
def test_every_step_passes_on_first_use_and_the_gates_hold_from_then_on(tmp_path: Path) -> None:
    """Then folders of our names stand in the repository, and its subject imports one and issues one call more."""
    folder, environment = tmp_path / "repository", fresh_environment(tmp_path / "environment")
    wheel = built(tmp_path)
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == {f"shardproof/{name}" for name in files_below("shardproof", *INSTALLED)}, "one name, every file"
    written_by_the_reader(folder)
    (install, prove, run), done_by = job(folder, wheel, environment)
    unset = done_by(install, SHARDPROOF="")
    assert unset.returncode != 0
    assert "SHARDPROOF: set the repository variable SHARDPROOF to a wheel or a git address" in unset.stderr
    subject = folder / "my_package" / "my_module.py"
    for step in (install, prove, run):
        if step == run:  # one case is enough for the gate
            subject.write_text(edited(subject.read_text(), "case.world_size != 2", ADAMW_REFUSED))
        done = done_by(step)
        assert done.returncode == 0, f"{step}\n{done.stdout}\n{done.stderr}"
        assert (step == install) is ("was stored for the first time" not in done.stdout)
    steps = STATED["jobs"]["prove"]["steps"]
    (uploaded,) = [step["with"]["path"].split() for step in steps if "upload-artifact" in step.get("uses", "")]
    assert all((folder / path).exists() for path in uploaded)
    more = "    with implicit_replication():\n        import torch.distributed as dist\n        dist.barrier()\n"
    program = edited(subject.read_text(), "    with implicit_replication():\n", more)
    with_folders_of_our_names(folder)
    subject.write_text(f"from parallel.mine import OWNER\n{program}\nassert OWNER == 'me'\n")
    proved, compared = done_by(prove), done_by(run)
    assert proved.returncode == 1 and "new" in proved.stdout and "--update-ledgers" in proved.stdout, proved.stdout
    assert compared.returncode == 1 and "exceeds --fail calls:0: tp data" in compared.stdout, compared.stdout


@pytest.mark.slow
@pytest.mark.parametrize("form", deep("half a CPU minute each", "wheel", "editable"))
def test_folders_of_our_names_do_not_stop_ranks_on_processes(tmp_path: Path, form: str) -> None:
    """Ranks on processes beside such folders are in tests/shardproof/test_public_names.py in every profile."""
    environment = fresh_environment(tmp_path / "environment")
    what = [str(built(tmp_path))] if form == "wheel" else ["-e", str(copied(tmp_path / "source"))]
    pip = [str(environment / "bin" / "python"), "-m", "pip", "install", *WORDS, *what]
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(pip, check=True, timeout=LONGEST_S, cwd=tmp_path, env=bare)  # a checkout would count as installed
    project = tmp_path / "project"
    (with_folders_of_our_names(project) / "mine.py").write_text(SUBJECT)
    for words in (("shardproof", *RUN), ("python", *SESSION, "--subject=mine:subject")):
        done = subprocess.run(
            [environment / "bin" / words[0], *words[1:]],
            cwd=project,
            env={"PATH": str(environment / "bin"), "HOME": str(project)},  # no path of this checkout
            capture_output=True,
            text=True,
            check=False,
            timeout=LONGEST_S,
        )
        assert done.returncode == 0, (words, done.stdout[-2000:] + done.stderr[-2000:])


def test_the_page_spells_out_no_host_and_names_the_recipes_own_words() -> None:
    text = PAGE.read_text() + RECIPE.read_text()
    assert not re.findall(r"\w+://|\b[\w-]+\.(?:org|com|io|net)\b", text)
    assert all(f"`{word}`" in PAGE.read_text() for word in ("SHARDPROOF", "TORCH_INDEX", "ledgers/", "baselines/"))
    assert STATED["env"]["SUBJECT"] == "my_package.my_module:subject"
