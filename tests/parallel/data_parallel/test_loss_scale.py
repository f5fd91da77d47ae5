"""The dynamic loss scale: the log of the seed, and the rule of Megatron's scaler."""

from __future__ import annotations

import importlib
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel.data_parallel.loss_scale import DynamicScale, scales


def test_the_log_of_the_seed() -> None:
    """20 of 200 steps are skipped from 2**32 on: the first only uses up patience, 19 halve, and the log says 8192."""
    assert scales(DynamicScale(), [True] * 20 + [False] * 180)[-1] == 8192.0


def test_a_finite_step_alone_does_not_restore_hysteresis() -> None:
    rule = DynamicScale(first=1024.0, interval=3)
    assert scales(rule, [True, False, True]) == (1024.0, 1024.0, 1024.0, 512.0)
    grown = scales(rule, [True, False, False, False, True, True])
    assert grown == (1024.0, 1024.0, 1024.0, 1024.0, 2048.0, 2048.0, 1024.0)


def test_the_scale_stays_above_the_least() -> None:
    assert scales(DynamicScale(first=4.0, least=2.0, hysteresis=1), [True] * 3)[-1] == 2.0


@pytest.mark.parametrize(
    "wrong", [{"least": 0.0}, {"growth_factor": 1.0}, {"backoff_factor": 1.0}, {"interval": 0}, {"hysteresis": 0}]
)
def test_a_rule_that_cannot_work_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}=.*; legal: "):
        DynamicScale(**wrong)


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
@given(
    st.lists(st.booleans(), max_size=40),
    st.fixed_dictionaries({"interval": st.integers(1, 4), "hysteresis": st.integers(1, 3)}),
)
def test_megatrons_own_scaler_agrees(steps: list[bool], words: dict[str, int]) -> None:
    theirs = importlib.import_module("megatron.core.optimizer.grad_scaler")
    rule = DynamicScale(first=2.0**16, least=2.0, **words)
    made = torch.tensor

    def on_cpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        return made(*args, **{**kwargs, "device": "cpu"})

    with patch.object(theirs.torch, "tensor", on_cpu):
        scaler = theirs.DynamicGradScaler(
            initial_scale=rule.first,
            min_scale=rule.least,
            growth_factor=rule.growth_factor,
            backoff_factor=rule.backoff_factor,
            growth_interval=rule.interval,
            hysteresis=rule.hysteresis,
        )
    found = [scaler.scale.item()]
    for infinite in steps:
        scaler.update(infinite)
        found.append(scaler.scale.item())
    assert scales(rule, steps) == tuple(found)
