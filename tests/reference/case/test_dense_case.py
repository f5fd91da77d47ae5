"""Cases that differ in how the work is split have one truth, bit by bit; words that the dense model reads are kept."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reference.case import Case
from reference.language.modes import MODES
from reference.model import dense_case as module
from reference.model.dense_case import SPLIT, dense_case
from reference.training.subject import true_activations, truth
from suites.drawing.strategies import cases

CPU = torch.device("cpu")


def computes_the_same(case: Case) -> bool:
    """Whether the dense model computes the same names and bits of a case and of what stands for it."""
    for function in (truth, true_activations):
        own, shared = function(case, CPU), function(dense_case(case), CPU)
        if own.keys() != shared.keys() or any(not torch.equal(own[name], shared[name]) for name in own):
            return False
    return True


@given(st.sampled_from(tuple(MODES)).flatmap(lambda mode: cases(mode, layers=1, micro=2, steps=2)))
def test_what_stands_for_a_case_has_its_truth(case: Case) -> None:
    assert computes_the_same(case)


def test_modes_and_meshes_of_one_model_are_one_case() -> None:
    words = "family=llama hidden=96 heads=24 kv_heads=8 ffn=28 vocab=268 dp=2 lr=0.1"
    texts = (f"mode={mode} {words}" for mode in ("mtp", "msp", "fsp"))
    others = (f"mode=isp {words} tp=4 wp=2 head=gather overlap=false", f"mode=tp {words} recompute=full delivery=flat")
    assert len({dense_case(Case.parse(text)) for text in (*texts, *others)}) == 1


@pytest.mark.parametrize("text", ["dp=2", "seed=1", "clip=0.1", "metric=true", "fuse_qkv=false", "optimizer=adamw"])
def test_other_words_make_another_case(text: str) -> None:
    assert dense_case(Case.parse(text)) != dense_case(Case.parse(""))


def test_data_that_depend_on_the_split_keep_the_case() -> None:
    case = Case.parse("family=llama vocab=297 tp=9 heads=18 kv_heads=9 hidden=36 ffn=36")
    assert dense_case(case) == case
    needs_its_mode = Case.parse("mode=msp variant=norm-average")
    assert dense_case(needs_its_mode) == needs_its_mode


@pytest.mark.parametrize("word", ["positions=learned", "tied=true", "label_smoothing=0.0", "dp=1"])
def test_a_word_too_many_is_seen(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.parse("mode=isp family=llama ffn=64 vocab=268 dp=2 label_smoothing=0.1 lr=0.1 layers=1")
    assert computes_the_same(case)
    name, _, value = word.partition("=")
    monkeypatch.setattr(module, "SPLIT", {**SPLIT, name: getattr(Case.parse(word), name)})
    assert not computes_the_same(case)
