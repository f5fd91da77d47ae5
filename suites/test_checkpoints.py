"""Checkpoints: what is saved at one layout is what the ranks hold; training goes on from it at another, and saves."""

from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof.harness.plain_case import PlainCase
from shardproof.harness.protocols import CaseLike
from shardproof.suites.drawing.own_cases import another_layout
from shardproof.suites.session.prover import Prover

EXAMPLES = max(1, settings().max_examples // 8)
"""An example proves two cases."""


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_training_goes_on_at_another_layout(
    prover: Prover, mode: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("checkpoint") / "saved"
    words = {"optimizer": data.draw(st.sampled_from(("adamw", "sgd")), label="optimizer"), "lr": 0.01}
    words |= {"bias_rate": 0.0}  # a checkpoint holds no biases of routers
    case = prover.draw_case(data, mode, where_known=words, steps=1)
    if lacking := [word for word in ("save", "load") if not hasattr(case, word)]:
        pytest.skip(f"cases of {prover.subject.name} have no word {lacking[0]}")
    chosen = Random(data.draw(st.integers(0, 2**16), label="layout"))
    goes_on(prover, case, another_layout(case, prover.subject, prover.worlds, chosen), folder)


def goes_on(prover: Prover, case: CaseLike, other: CaseLike, folder: Path) -> None:
    """Assert that the first case saves into this folder what its ranks hold, and that the other one goes on from it.

    The other case saves again, beside the folder, so that counts and states after a load are checked too. Skips the
    test when the subject writes nothing.
    """
    prover.holds(case.but(save=str(folder)), "merge", "saved")
    if not folder.is_dir() or not any(folder.iterdir()):
        pytest.skip(f"{prover.subject.name} writes no folder for save=")
    fresh = {} if isinstance(case, PlainCase) else {"init": "whole"}  # initial values are those of the checkpoint
    again = folder.with_name(f"{folder.name}-again")
    prover.holds(other.but(load=str(folder), save=str(again), **fresh), "merge", "forward", "update", "saved")
