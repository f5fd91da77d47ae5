"""The first place of what is right in the first micro-batch and wrong in a later one, or in a later step."""

import pytest

from shardproof.bugs.planting import plant_subject, replace_text
from tests.harness.proofs import proved

_LINE = "x = x + self._dropout_of("
_CASE = "tp=2 layers=1 hidden=8 heads=2 ffn=6 vocab=16 seq=4 steps=2 micro=2 lr=0.1"


@pytest.mark.parametrize(
    ("phase", "wrong", "at"), [("forward", "0.01 * x", (0, 1)), ("backward", "(x - x.detach()) / 2", (1, 0))]
)
def test_the_module_is_the_place_in_later_micro_batches_and_steps(phase: str, wrong: str, at: tuple[int, int]) -> None:
    planted = f"x = x + {wrong} if draw == {at} else x; {_LINE}"
    result = proved(plant_subject(replace_text("shardproof.parallel.model.transformer", _LINE, planted)), _CASE)
    assert result.diagnosis
    first, (step, micro) = result.diagnosis.first, at
    assert (first.phase, first.region, first.step) == (phase, "layers.0.attention_norm", step)
    assert f"in micro-batch {micro}" in first.beside
