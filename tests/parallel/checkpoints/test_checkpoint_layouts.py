"""Checkpoints over pairs of layouts: round trips are the identity, and training goes on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.outcome.blocks import localize
from harness.outcome.merging import merge
from reference.case import Case
from tests.parallel.checkpoints.layouts import MODEL, full_tensors, layouts, models, relaid, trained

DEEP = settings().max_examples > 100
PAIRS = 200 if DEEP else 3
"""Every pair costs two seconds: DCP writes and reads a few thousand small chunks."""
ADAMW = "optimizer=adamw lr=0.01 clip=0.05"
HALF = "dtype=float16 master=float32 optimizer=adamw lr=0.01 scaler=dynamic loss_scale=8"
SAME = (
    f"mode=tp-sp tp=2 dp=3 zero=1 bucket=700 micro=2 {ADAMW} dropout=0.1 attention_dropout=0.1 random=stateful",
    f"mode=tp tp=2 cp=2 zero=3 micro=3 {ADAMW} tied=false dropout=0.1",
    f"mode=tp tp=2 pp=3 layers=4 first_layers=2 micro=3 {ADAMW}",
    f"mode=tp tp=1 pp=2 dp=2 schedule=interleaved chunks=2 layers=4 zero=1 bucket=700 micro=4 {ADAMW}",
    f"mode=tp tp=2 dp=3 zero=1 micro=2 {HALF} grad_dtype=float32",
    "mode=isp tp=3 dp=2 wp=2 micro=3",
)


@settings(max_examples=PAIRS)
@given(data=st.data())
def test_a_round_trip_is_the_identity(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    model, folder = data.draw(models(), label="model"), tmp_path_factory.mktemp("pair")
    one, other = data.draw(layouts(model), label="one"), data.draw(layouts(model), label="other")
    trained(one.but(steps=1, save=str(folder / "a")))
    relaid(other, folder / "a", folder / "b")
    relaid(one, folder / "b", folder / "c")
    first = full_tensors(folder / "a")
    assert len([key for key in first if key.startswith("optimizer.")]) % 3 == 0
    for name in ("b", "c"):
        found = full_tensors(folder / name)
        assert found.keys() == first.keys()
        assert not [key for key in first if not torch.equal(first[key], found[key])]


@pytest.mark.parametrize("words", SAME if DEEP else SAME[:1])
def test_in_one_layout_training_goes_on_bit_for_bit(tmp_path: Path, words: str) -> None:
    case, folder = Case.parse(f"{MODEL} {words}"), str(tmp_path / "half")
    whole = merge([localize(outcome) for outcome in trained(case.but(steps=4))]).tensors
    trained(case.but(steps=2, save=folder))
    second = merge([localize(outcome) for outcome in trained(case.but(steps=2, load=folder))]).tensors
    again = {name: tensor for name, tensor in second.items() if name.startswith("param/")}
    assert len(again) > 20
    for kind in ("loss", "logits", "grad_norm"):
        again |= {f"{kind}/{step + 2}": second[f"{kind}/{step}"] for step in range(2)}
    assert not [name for name, tensor in again.items() if not torch.equal(tensor, whole[name])]
