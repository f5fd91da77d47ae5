"""A factor on a tensor: half of it, or half as much again, fails in every dtype and size, or the tensor is undecided.

Planted in what the ranks return, one tensor of each kind at a time, and compared by the limits of the clean run.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.checking.evidence import Evidence
from harness.checking.measures.kinds import kind_of, kind_rms
from harness.checking.measures.tolerance import FACTORS
from harness.checking.numeric_checks import held
from harness.engines.threads.inproc import InprocEngine
from harness.outcome.merging import Merged
from harness.running.judging import judged
from harness.running.trials.runs import recorded, watched
from harness.running.trials.trial import Trial
from harness.subject import named
from parallel.subject import subject
from reference.case import Case

SMALL = "layers=1 hidden=16 heads=4 ffn=16 vocab=128 "
CASES = (
    SMALL + "dtype=bfloat16 seq=8 optimizer=adamw lr=0.01",
    SMALL + "dtype=bfloat16 seq=128 batch=4 micro=1",
    SMALL + "dtype=float16 seq=64 mode=isp lr=0.1",
    SMALL + "dtype=float32 seq=8 mode=msp optimizer=adamw fuse_qkv=false micro=1 batch=1",
)


def evidence_of(text: str) -> Evidence:
    """The evidence of our subject, with everything that the checks came to need."""
    with InprocEngine() as engine:
        trial = Trial(case=Case.parse(text), subject=named(subject), engine=engine)
        return judged(trial, watched(trial, recorded(trial)))[0]


@pytest.mark.parametrize("text", CASES)
def test_a_tensor_times_a_factor_fails_or_is_undecided(text: str) -> None:
    evidence = evidence_of(text)
    rms = kind_rms(evidence.truth)
    undecided = set()
    for name in (name for name, tensor in evidence.truth.items() if tensor.is_floating_point()):
        clean = held(evidence, name, rms[kind_of(name)])
        assert clean.right, name
        if not clean.decidable:
            undecided.add(name)
        for factor in FACTORS if clean.decidable else ():
            tensors = {**evidence.merged.tensors, name: evidence.merged.tensors[name] * factor}
            wrong = replace(evidence, merged=Merged(tensors=tensors, flaws=()))
            assert not held(wrong, name, rms[kind_of(name)]).right, (name, factor)
    assert len(undecided) <= 0.2 * len(evidence.truth), undecided
