"""A failure as a stand-alone script: it repeats what failed, is quiet once that is mended, and needs none of us."""

import ast
import base64
import runpy
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from shardproof.bugs.planting import plant_subject, replace_text
from shardproof.harness.engines.engine import Engine
from shardproof.harness.reproducing import repro_script
from shardproof.harness.reproducing.repro import emit, shown_name, shrink_failure
from shardproof.harness.subject import case_of, resolve_subject
from shardproof.reference.case import Case
from tests.forked import started
from tests.harness.command_line import ONE, TOY, CommandLine

LARGE = "mode=tp tp=2 dp=3 layers=2 heads=4 kv_heads=2 hidden=16 ffn=24 seq=16 batch=2 micro=2 steps=2 vocab=264"
SMALL = "mode=tp tp=2 layers=1 heads=4 kv_heads=2 hidden=16 ffn=24 seq=8 batch=1 micro=1 steps=1 vocab=264"
THIRD = """
import torch
import torch.distributed as dist
from shardproof.reference.training import truth as dense

FACTOR = 2


def subject(case, device):
    outcome = dense.subject(case, device)
    ones = torch.ones(())
    dist.all_reduce(ones)
    outcome["grad/final_norm.weight"] *= FACTOR * ones / case.world_size
    return {name: value for name, value in outcome.items() if name.startswith(("loss/", "grad/"))}
"""
"""A subject of another project: it needs a process group, and doubles a gradient."""


def script_of(folder: Path, case: str, subject: str, engine: Engine) -> Path:
    """The script that repeats a failure, in this folder."""
    text = emit(Case.parse(case), subject, engine)
    assert text is not None
    (folder / "repro.py").write_text(text)
    return folder / "repro.py"


def main_of(script: str) -> None:
    """Run a script in this process as its header says."""
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")


def quickly(script: Path) -> tuple[int, str]:
    """Exit status and output of a script, run in a process that need not import torch again."""
    rank = started(main_of, script.name, folder=script.parent)
    return rank.ended(240.0), rank.out


def test_a_script_repeats_the_failure_and_is_quiet_once_it_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Engine
) -> None:
    (tmp_path / "third.py").write_text(THIRD)
    monkeypatch.syspath_prepend(str(tmp_path))
    script = script_of(tmp_path, f"{SMALL} micro=2", "third:subject", engine)
    text, command = script.read_text(), [sys.executable, script.name]
    wrong = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert wrong.returncode == 1, wrong.stderr
    assert "grad/final_norm.weight: peak error" in wrong.stdout and ", allowed 1e-09\nreproduced" in wrong.stdout
    (tmp_path / "third.py").write_text(THIRD.replace("FACTOR = 2", "FACTOR = 1"))
    status, out = quickly(script)
    assert (status, out.splitlines()[-1]) == (0, "not reproduced")
    assert _imported(text) <= set(sys.stdlib_module_names) | {"torch"}
    assert "shardproof run" in text and "case_text': ''" in text


def _imported(text: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module).split(".")[0])
    return names


HALVED = "shardproof.parallel.layers.linear", "grad_x = reduced.wait()", "grad_x = reduced.wait() / 2"
UNSUMMED = "shardproof.parallel.training", "    for axis in rank.strategy.data_axes:\n", "    for axis in ():\n"


@pytest.mark.parametrize(
    ("text", "bug", "smallest"),
    [
        pytest.param(LARGE, HALVED, (2, 1, 1, 1, 1, 8), marks=pytest.mark.deep("three CPU seconds")),
        (f"{SMALL} dp=3", UNSUMMED, (6, 1, 1, 1, 1, 8)),
    ],
)
def test_a_failing_case_is_made_as_small_as_still_fails(
    text: str, bug: tuple[str, str, str], smallest: tuple[int, ...], engine: Engine
) -> None:
    """Data ranks that are not summed need data ranks."""
    failure = shrink_failure(Case.parse(text), plant_subject(replace_text(*bug)), engine)
    assert failure is not None and failure.name.startswith("grad/")
    case: Any = failure.result.case
    assert (case.world_size, case.steps, case.micro, case.layers, case.batch, case.seq) == smallest


def test_a_right_subject_gives_no_script(engine: Engine) -> None:
    """Nor where control runs alone show that it is right."""
    assert (
        emit(Case.parse(f"{SMALL} dtype=bfloat16 optimizer=adamw"), "shardproof.parallel.subject:subject", engine)
        is None
    )


def test_a_subject_that_raises_is_repeated_too(tmp_path: Path, engine: Engine) -> None:
    text = script_of(tmp_path, f"{SMALL} seed=13", f"{TOY}raising", engine).read_text()
    assert text.startswith('"""the subject does not finish when tests.harness.toy_subjects:raising')


LEAVING = """
import os
import sys
import torch
import torch.distributed as dist


def subject(case, device):
    if dist.get_rank() == 1:
        sys.exit(3)
    dist.all_reduce(torch.ones(()))
    return {}
"""
"""Rank 0 waits for a rank that has left."""


def test_a_script_does_not_wait_for_a_rank_that_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Engine
) -> None:
    (tmp_path / "leaving.py").write_text(LEAVING)
    monkeypatch.syspath_prepend(str(tmp_path))
    script = script_of(tmp_path, SMALL, "leaving:subject", engine)
    for leave in ("sys.exit(3)", "os._exit(3)"):
        (tmp_path / "leaving.py").write_text(LEAVING.replace("sys.exit(3)", leave))
        start_s = time.monotonic()
        assert quickly(script)[0] == 1
        assert time.monotonic() - start_s < 40, "the limit of the script is 120 s, that of its group 60 s"


def test_the_command_writes_the_script_of_our_own_subject(shardproof_here: CommandLine) -> None:
    words = "mode=mtp tp=2 family=internlm2 vocab=264 layers=1 seq=8 head=gather"
    status, out, err = shardproof_here("run", words, "--variant", "gathered-logits-loss", "--emit-repro", "repro.py")
    assert status == 1, err
    assert "repro.py repeats loss/0: run it with python repro.py" in " ".join(out.split()) and Path(
        "repro.py"
    ).read_text().startswith('"""loss/0 is wrong when')
    status, out, _ = shardproof_here("run", ONE, "--emit-repro", "none.py")
    assert status == 0
    assert "none.py was not written: no case failed" in " ".join(out.split()) and not Path("none.py").exists()


def test_a_case_of_own_words_is_carried_whole(engine: Engine) -> None:
    doubled = resolve_subject("tests.harness.own_words:doubled")
    case: Any = case_of("tp=2 dp=3 act=tanh steps=1", doubled)
    text = emit(case, doubled, engine)
    assert text is not None and shown_name(text) == "loss/0"
    facts = ast.literal_eval(text.partition("\n\nFACTS = ")[2].partition("\n\nif __name__")[0])
    carried = repro_script.case_of(facts)
    shrunk = case.but(tp=carried.tp, dp=carried.dp, micro=carried.micro)
    assert (carried.act, carried.width, carried.axes) == ("tanh", 12, shrunk.axes)
    last = (0, shrunk.micro - 1, shrunk.dp - 1, 5)
    assert carried.samples(*last) == shrunk.samples(*last)


class Patched:
    """Right inside its session alone: a patch that a library needs."""

    inside = False

    def __call__(self, case: Any, device: torch.device) -> dict[str, float]:
        return {"loss/0": float(self.inside)}

    @contextmanager
    def session(self) -> Iterator[None]:
        self.inside = True
        yield
        self.inside = False


patched = Patched()


def test_a_script_runs_the_subject_in_its_session(tmp_path: Path) -> None:
    one = base64.b64encode(zlib.compress(struct.pack("d", 1.0))).decode()
    facts = {"subject": f"{__name__}:patched", "case_text": "", "case": {}, "world_size": 1, "seed": 0}
    facts |= {"name": "loss/0", "shape": (), "measure": "frobenius", "allowed": 0.0, "scale": 1.0, "truth": one}
    assert repro_script.on_rank(facts, 0, str(tmp_path / "store")) == repro_script.GONE
