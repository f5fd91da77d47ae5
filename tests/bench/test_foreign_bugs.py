"""What an edit changes, in units of what rounding may change."""

import torch

from bench.foreign_bugs import BOTH, change, units_of


def test_a_run_that_is_right_by_luck_is_not_all_that_rounding_does() -> None:
    shift, moved, floors = torch.tensor([3e-5, 0.0]), torch.ones(2), units_of(torch.float32)
    lucky, another = torch.tensor([0.0, 1e-6]), torch.tensor([6e-6, 0.0])
    alone, beside = (
        change("param/b", shift, errors, moved, torch.zeros(2), floors, 0.0) for errors in ([lucky], [lucky, another])
    )
    assert alone.units > BOTH > 1 > beside.units
    stored = change("param/b", shift, [lucky], moved, torch.full((2,), 500.0), floors, 0.0)
    assert stored.units < 1 < alone.units, "half an epsilon of what is stored is no flaw"
