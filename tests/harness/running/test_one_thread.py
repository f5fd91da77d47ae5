"""Results depend neither on the number of processors or of threads of torch, nor on cases that were proved before."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.harness import own_words
from tests.harness.running.subjects import first_products
from tests.harness.running.subjects.first_products import digests

ROOT = Path(__file__).resolve().parents[3]
SUBJECT = "tests.harness.running.subjects.first_products:subject"
CASES = (
    "dp=2 dtype=float32",
    "dp=2 dtype=float32 way=thread seed=2",
    "dp=3 dtype=float32 way=executor",
    "dp=2 again=true dtype=bfloat16",
    "dp=2",
)
"""Cases of few seconds: the later ones have new threads of ranks, in a process that has computed before."""
MANY = {
    SUBJECT: tuple(
        f"dp={dp} dtype={dtype} way={way} again={again} seed={seed}"
        for dp in (2, 3)
        for dtype in ("float64", "float32", "bfloat16")
        for way in first_products.WAYS
        for again in ("true", "false")
        for seed in (1, 2)
    ),
    "shardproof.parallel.subject:subject": (
        "mode=tp tp=2 dtype=bfloat16",
        "mode=tp-sp tp=2 dp=2 dtype=float32",
        "mode=msp tp=2 dtype=float32",
        "mode=tp tp=2 pp=2",
        "mode=fsp tp=2 dtype=float32",
    ),
    "tests.harness.own_words:subject": own_words.CASES,
}


def in_new_process(threads: int, subject: str, cases: Sequence[str]) -> dict[str, str]:
    """The digests of these cases in an interpreter whose libraries begin with this number of threads."""
    numbers = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    words = [sys.executable, "-m", first_products.__name__, str(threads), subject, *cases]
    done = subprocess.run(words, cwd=ROOT, env=os.environ | numbers, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_results_are_the_same_bits_on_any_number_of_threads_in_any_order() -> None:
    """Outcomes, truths, errors and ledgers; ranks, their threads, executors and a truth with threads of its own."""
    found = digests(SUBJECT, CASES)
    assert all(digest.startswith("pass ") for digest in found.values()), found
    assert in_new_process(4, SUBJECT, CASES[::-1]) == found
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        assert digests(SUBJECT, CASES[2:] + CASES[:2]) == found
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)


@pytest.mark.deep("two CPU minutes: three interpreters for each subject")
@pytest.mark.parametrize("subject", MANY)
def test_shuffled_lists_of_many_cases_are_the_same_bits_on_1_2_and_4_threads(subject: str) -> None:
    order, found = list(MANY[subject]), list[dict[str, str]]()
    for threads in (1, 2, 4):
        random.Random(threads).shuffle(order)
        found.append(in_new_process(threads, subject, order))
    assert found[0] == found[1] == found[2]
    assert all(digest.startswith("pass ") for digest in found[0].values()), found[0]
