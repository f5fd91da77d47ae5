"""The range of Adam behind steps that were skipped: it is that of the steps that were taken, and no others count."""

import torch

from shardproof.reference.case import Case
from shardproof.reference.model.parameters import shapes
from shardproof.reference.training.adam import slack

WORDS = "layers=1 heads=2 hidden=8 ffn=12 vocab=20 seq=4 dtype=float16 master=float32 optimizer=adamw scaler=dynamic"


def test_steps_that_are_skipped_are_none_of_adams() -> None:
    """Two skips, a step, a skip, a step: the range is that of two steps in a row."""
    torch.manual_seed(0)
    first, second, third = ({n: torch.randn(shape) for n, shape in shapes(Case.parse(WORDS)).items()} for _ in range(3))
    found = []
    for taken in ((0, 1), (2, 4)):
        states = {f"exp_avg_after/{step}/{n}": x for step in range(taken[0], taken[1]) for n, x in first.items()}
        states |= {f"exp_avg_sq_after/{step}/{n}": x.abs() for step in range(*taken) for n, x in first.items()}
        truth = states | {f"exp_avg_after/{taken[1]}/{n}": x for n, x in second.items()}
        truth |= {f"skipped/{step}": torch.tensor(int(step not in taken)) for step in range(taken[1] + 1)}
        control = truth | {f"exp_avg_after/{taken[1]}/{n}": x for n, x in third.items()}
        found.append(slack(Case.parse(f"{WORDS} steps={taken[1] + 1}"), states, truth, [control]))
    in_a_row, behind = found
    assert [*behind] == [name.replace("after/0", "after/2") for name in in_a_row] and behind
    assert all(torch.equal(*pair) for pair in zip(in_a_row.values(), behind.values(), strict=True))
