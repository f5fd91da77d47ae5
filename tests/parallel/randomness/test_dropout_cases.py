"""Dropout in every mode and scheme: the dense model with the same masks; masks that depend on no layout."""

from __future__ import annotations

import pytest
import torch

from harness.engines.threads.inproc import InprocEngine
from harness.outcome.merging import merge
from harness.running.ranks.execution import execute
from parallel.subject import subject
from reference.case import Case
from reference.training.subject import subject as dense
from tests.parallel.case_tables import DROPOUT


@pytest.mark.parametrize("words", ["mode=tp-sp tp=2 pp=2 dp=1 micro=12 recompute=full", "tp=1 cp=2 micro=6 dp=2"])
def test_the_fields_masks_depend_on_no_layout_and_on_no_schedule(words: str) -> None:
    """The dense model states them, and so does any way to run the same global batch."""
    case = Case.parse(f"{DROPOUT.sizes} {words} steps=1")
    found = merge(execute(case, subject, InprocEngine(), text=str(case)).outcomes).tensors
    right = dense(case.but(mode="tp", tp=1, pp=1, cp=1, dp=3, micro=4, recompute="none"), torch.device("cpu"))
    masks = {name: mask for name, mask in right.items() if name.startswith("mask/")}
    assert {name for name in found if name.startswith("mask/")} == masks.keys()
    assert all(torch.equal(found[name], mask) for name, mask in masks.items())


def test_words_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="random=stateful: is where masks come from"):
        Case.parse("random=stateful")
    with pytest.raises(ValueError, match=r"attention_dropout=1.0: must lie in \[0, 1\)"):
        Case.parse("attention_dropout=1")
