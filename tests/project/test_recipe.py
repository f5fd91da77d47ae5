"""docs/ci.md as it stands, in an empty repository: its two files, the wheel in its variable, every step of its job.

The steps run as GitHub runs them, each by `bash -e`. The wheel is installed into a virtual environment that sees what
is installed here, but not the shardproof that is: nothing is downloaded.
"""

import os
import re
import shutil
import subprocess
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import ROOT
from tests.project.installed import LONGEST_S, ROOMS, fresh_environment

PAGE, RECIPE = ROOT / "docs" / "ci.md", ROOT / "docs" / "shardproof.yml"
FEW = "--hypothesis-profile=one-case -p no:cacheprovider -k 'stored or losses'"
"""An example of a few properties, without workers: the recipe is tested here."""
ADAMW_REFUSED = "case.world_size != 2 or case.optimizer == 'adamw'"
"""The condition for what the page's subject refuses, with one of its two default cases in it."""


@pytest.mark.slow  # where the wheel is: another worker would build it once more
def test_the_wheel_holds_every_file_of_every_room(wheel: Path) -> None:
    files = {path.relative_to(ROOT).as_posix() for room in ROOMS for path in (ROOT / room).rglob("*") if path.is_file()}
    assert {name for name in files if "__pycache__" not in name} <= set(zipfile.ZipFile(wheel).namelist())


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The job of the recipe in a repository: its environment, and its steps that are commands, by name."""

    folder: Path
    env: dict[str, str]
    steps: dict[str, str]

    def run(self, name: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run the step of this name."""
        return subprocess.run(
            ["bash", "--noprofile", "--norc", "-e", "-c", self.steps[name]],
            cwd=self.folder,
            env=self.env | env,
            capture_output=True,
            text=True,
            check=False,
            timeout=LONGEST_S,
        )


def job(folder: Path, variables: dict[str, str], environment: Path) -> Job:
    """The page's job in the repository `folder`, with these repository variables, on this virtual environment."""
    recipe: dict[str, Any] = yaml.safe_load(RECIPE.read_text())
    asked = {name: re.fullmatch(r"\$\{\{ vars\.(\w+) \}\}", text) for name, text in recipe["env"].items()}
    words = {n: variables.get(found[1], "") if (found := asked[n]) else text for n, text in recipe["env"].items()}
    inherited = {name: os.environ[name] for name in ("HOME", "TMPDIR", "LD_LIBRARY_PATH") if name in os.environ}
    plain = {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_COMPILE": "1"}
    plain |= {"PYTEST_ADDOPTS": FEW, "PYTEST_XDIST_AUTO_NUM_WORKERS": "0"}
    path = os.pathsep.join([str(environment / "bin"), os.environ["PATH"]])
    steps = {step["name"]: step["run"] for step in recipe["jobs"]["prove"]["steps"] if "run" in step}
    return Job(folder=folder, env=inherited | plain | words | {"PATH": path}, steps=steps)


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


@pytest.mark.slow
def test_every_step_passes_on_first_use_and_the_gates_hold_from_then_on(wheel: Path, tmp_path: Path) -> None:
    folder = tmp_path / "repository"
    written_by_the_reader(folder)
    found = job(folder, {"SHARDPROOF": str(wheel)}, fresh_environment(tmp_path / "environment"))
    install, prove, run = found.steps
    unset = found.run(install, SHARDPROOF="")
    assert unset.returncode != 0
    assert "SHARDPROOF: set the repository variable SHARDPROOF to a wheel or a git address" in unset.stderr
    subject = folder / "my_package" / "my_module.py"
    for step in (install, prove, run):
        if step == run:  # one case is enough for the gate
            subject.write_text(edited(subject.read_text(), "case.world_size != 2", ADAMW_REFUSED))
        done = found.run(step)
        assert done.returncode == 0, f"{step}\n{done.stdout}\n{done.stderr}"
        assert (step == install) is ("was stored for the first time" not in done.stdout)
    steps = yaml.safe_load(RECIPE.read_text())["jobs"]["prove"]["steps"]
    (uploaded,) = [step["with"]["path"].split() for step in steps if "upload-artifact" in step.get("uses", "")]
    assert all((folder / path).exists() for path in uploaded)
    more = "    with implicit_replication():\n        import torch.distributed as dist\n        dist.barrier()\n"
    subject.write_text(edited(subject.read_text(), "    with implicit_replication():\n", more))
    compared = found.run(run)
    assert compared.returncode == 1 and "breach: calls:0: tp grad_sync" in compared.stdout, compared.stdout


def test_the_page_spells_out_no_host_and_names_the_recipes_own_words() -> None:
    text = PAGE.read_text() + RECIPE.read_text()
    assert not re.findall(r"\w+://|\b[\w-]+\.(?:org|com|io|net)\b", text)
    recipe = yaml.safe_load(RECIPE.read_text())
    assert all(f"`{word}`" in PAGE.read_text() for word in ("SHARDPROOF", "TORCH_INDEX", "ledgers/", "baselines/"))
    assert recipe["env"]["SUBJECT"] == "my_package.my_module:subject"
