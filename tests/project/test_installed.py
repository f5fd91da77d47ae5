"""An installed shardproof, from a wheel or editable, in a folder with packages and folders of our names."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.deep import deep
from tests.project.installed import LONGEST_S, ROOMS, WORDS, copied, fresh_environment

SUBJECT = """
import torch, torch.distributed as dist
from parallel.mine import OWNER

def subject(case, device):
    local = torch.ones((), dtype=torch.float64) / dist.get_world_size()
    dist.all_reduce(local)
    return {"loss/0": local if OWNER == "me" else None}

subject.words, subject.truth, subject.cases = {"width": 4}, "alone", ("tp=2 steps=1",)
"""
RUN = ("run", "--subject", "mine:subject")
PYTEST = ("-q", "-p", "no:cacheprovider", "--hypothesis-profile=one-case", "--subject=mine:subject", "--pyargs")
COMMANDS = (
    ("shardproof", *RUN),
    ("python", "-m", "shardproof", *RUN),
    ("python", "-c", "import sys, pytest; del sys.path[0]; pytest.console_main()", *PYTEST, "suites.test_forward"),
    ("python", "-m", "pytest", *PYTEST, "suites.test_forward"),
)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["wheel", *deep("half a CPU minute each", "wheel, pool", "editable, pool")])
def test_folders_of_our_names_do_not_stop_it(wheel: Path, tmp_path: Path, form: str) -> None:
    """Ranks on processes beside such folders are in tests/shardproof/test_public_names.py in every profile."""
    environment = fresh_environment(tmp_path / "environment")
    (tmp_path / "source").mkdir()
    what = ["-e", str(copied(tmp_path / "source"))] if "editable" in form else [str(wheel)]
    pip = [str(environment / "bin" / "python"), "-m", "pip", "install", *WORDS, *what]
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(pip, check=True, timeout=LONGEST_S, cwd=tmp_path, env=bare)  # a checkout would count as installed
    folder = tmp_path / "project"
    for room in {*ROOMS} - {"shardproof"}:
        (folder / room).mkdir(parents=True)  # no package, but for one: notes, tables, pictures
    (folder / "parallel" / "__init__.py").touch()
    (folder / "parallel" / "mine.py").write_text("OWNER = 'me'\n")
    (folder / "mine.py").write_text(SUBJECT)
    first, *others = COMMANDS
    for words in ((*first, "--engine", "pool") if "pool" in form else first, *others):
        done = subprocess.run(
            [environment / "bin" / words[0], *words[1:]],
            cwd=folder,
            env={"PATH": str(environment / "bin"), "HOME": str(tmp_path)},  # no path of this checkout
            capture_output=True,
            text=True,
            check=False,
            timeout=LONGEST_S,
        )
        assert done.returncode == 0, (words, done.stdout[-2000:] + done.stderr[-2000:])
