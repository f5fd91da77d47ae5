"""What Megatron counts and issues beside the closed form: the published run of GPT-3 857M on four ranks."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from parallel.data_parallel.megatron import estimated_mb
from parallel.subject import subject
from reference.case import Case

PUBLISHED = "preset=gpt3-857m mode=tp tp=4 seq=2048 batch=4 micro=4 dtype=float16"


def test_the_numbers_of_the_published_run() -> None:
    told = dict(subject.beside(Case.parse(PUBLISHED)))
    replicated = 24 * (4 * 1024 + 2 * 1024) + 2 * 1024 + 2048 * 1024  # norms, biases of rows, last norm, positions
    split = 24 * (12 * 1024**2 + 3 * 1024 + 4 * 1024) + 50688 * 1024
    assert told["parameters of a rank"] == f"{replicated + split // 4:,}" == "90,763,264"
    assert told["parameters of the model"] == f"{replicated + split:,}" == "356,313,088"
    assert told["weights and optimizer of a rank by Megatron-LM's own estimate"] == "1,519.18 MB"
    activation, token = 4 * 2048 * 1024 * 2, 4 * 2048
    for phase, calls in {
        "data": f"5 broadcast of {3 * 8 * token + 4 * token + 4 * 2048**2:,} B together",
        "forward": f"49 all_reduce of {49 * activation:,} B together",
        "loss": f"3 all_reduce of {3 * 4 * token:,} B together",
        "backward": f"49 all_reduce of {49 * activation:,} B together",
    }.items():
        assert told[f"our ledger, a micro-batch: {phase}"] == calls
    assert told["our ledger, a step: grad_sync"] == "1 all_reduce of 4 B together"
    assert told["Megatron's step: gradients"] == "all_reduce of 181,526,528 B float16 over a group of one"


def test_the_calls_of_a_step_are_those_that_were_measured() -> None:
    """404 all-reduces of four micro-batches and five of the step over four ranks, two over groups of one."""
    case = Case.parse(f"{PUBLISHED} steps=1")
    ours = Counter(term.op for term in subject.expected(case) for _ in range(term.calls))
    calls = [value for what, value in subject.beside(case) if what.startswith("Megatron's step")]
    alone = [value for value in calls if value.endswith("a group of one")]
    assert (ours["all_reduce"] + len(calls) - len(alone), len(alone)) == (404 + 5, 2)
    scaled = Case.parse(f"{PUBLISHED} steps=1 master=float32 scaler=dynamic")
    found = sum(
        term.calls for term in subject.expected(scaled) if term.reduce_op == "max" and term.phase == "grad_sync"
    )
    assert found == 1
    assert not [what for what, _ in subject.beside(scaled) if "infinite" in what]


@pytest.mark.parametrize(("words", "bytes_of_one"), [("dp=8", 18.0), ("dp=8 zero=1", 6 + 12 / 8)])
def test_a_distributed_optimizer_shares_twelve_bytes(words: str, bytes_of_one: float) -> None:
    case = Case.parse(f"{PUBLISHED} {words}")
    counted = 24 * (12 * 1024**2 + 4 * 1024) + 2 * 1024 + 50688 * 1024
    assert math.isclose(estimated_mb(case), counted / 4 * bytes_of_one / 2**20)


def test_other_systems_have_no_such_lines() -> None:
    assert not [*subject.beside(Case.parse("preset=tiny-internlm2 mode=isp"))]
