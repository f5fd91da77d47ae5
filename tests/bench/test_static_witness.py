"""The type checker of torchtitan's own package agrees with our verdict, and is no witness that agrees with anything."""

import subprocess
import sys

import pytest

from tests import ROOT

PLANTED = """
import sys
from bench import static_witness
import suites.subjects.torchtitan
from torchtitan.protocols.module import Module
Module._redistribute_outputs = lambda module, dims, outputs: outputs  # partial sums stay what they are
sys.exit(static_witness.main("tp=2 dp=2"))
"""


@pytest.mark.deep("a CPU minute, where torchtitan is installed")
@pytest.mark.parametrize(
    ("command", "status", "words"),
    [
        (["-m", "bench.static_witness", "tp=2 dp=2"], 0, "typed"),
        (["-m", "bench.static_witness", "tp=2 dp=2 kind=qwen3"], 0, "typed"),
        (["-c", PLANTED], 1, "SpmdTypeError"),
    ],
)
def test_a_model_has_types_and_without_its_sums_it_has_none(command: list[str], status: int, words: str) -> None:
    pytest.importorskip("torchtitan", reason="needs torchtitan")
    told = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (told.returncode, words in told.stdout) == (status, True), told.stdout + told.stderr
