"""The property of checkpoints: a right subject of own words passes, wrong ones fail, one that saves nothing is skipped;
and it shows a bug of ours that a load at one layout does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _pytest.outcomes import Skipped
from torch import Tensor

from bugs.planting import planted, replaced
from harness.checking.evidence import PASS
from harness.plain_case import Vocabulary
from harness.protocols import unsaved
from harness.shard import Shard
from harness.subject import named
from reference.case import Case
from suites.drawing.layouts import elsewhere
from suites.session.prover import Prover
from suites.test_checkpoints import goes_on
from tests.harness.own_words import Network, trained, weights

SHAPES = {"w1": (24, 12), "w2": (12, 24)}


class Saving(Network):
    """The network in whose cases save= and load= name folders: a file of shards by every rank. `wrong`: a bug."""

    words: Any = {"width": 12, "act": "relu", "save": "none", "load": "none"}
    cases: Any = ("tp=2 dp=3", "tp=3", "dp=2")

    def __init__(self, wrong: str = "") -> None:
        super().__init__()
        self.wrong = wrong

    def weights(self, case: Any) -> tuple[Tensor, Tensor]:
        """Those of the folder, which every rank cuts for itself."""
        w1, w2 = _read(case.load, case.dtype) if case.load != "none" else weights(case)
        return (w1.roll(1, 0), w2) if self.wrong == "load" and case.load != "none" else (w1, w2)

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Any]:
        outcome = dict(super().__call__(case, device))
        if case.save == "none" or self.wrong == "nothing":
            return outcome
        held = {name: outcome[f"param/{name}"] for name in ("w1", "w2")}
        if self.wrong == "save":
            held["w1"] = replace(held["w1"], local=held["w1"].local.flip(0))
        Path(case.save).mkdir(exist_ok=True)
        torch.save({n: (x.local, x.offsets) for n, x in held.items()}, Path(case.save) / f"{dist.get_rank()}.pt")
        dist.barrier()
        files = dict(zip(("w1", "w2"), _read(case.save, case.dtype), strict=True)) if dist.get_rank() == 0 else {}
        return outcome | {f"saved/param/{n}": Shard(x, (0, 0), tuple(x.shape)) for n, x in files.items()}


def _read(folder: str, dtype: str) -> tuple[Tensor, Tensor]:
    """W1 and W2 in full."""
    whole = {name: torch.full(shape, torch.nan, dtype=torch.float64) for name, shape in SHAPES.items()}
    for file in Path(folder).glob("*.pt"):
        for name, (local, at) in torch.load(file).items():
            whole[name][at[0] : at[0] + local.shape[0], at[1] : at[1] + local.shape[1]] = local
    w1, w2 = (tensor.to(getattr(torch, dtype)) for tensor in whole.values())
    return w1, w2


def dense(case: Any, device: torch.device) -> Mapping[str, Tensor]:
    """Dense training from the same folder; it is never given one to save into."""
    assert case.save == "none"
    return trained(case, *(_read(case.load, case.dtype) if case.load != "none" else weights(case)))


Saving.truth = staticmethod(dense)


WRONG = {
    "save": (AssertionError, "saved/param/w1"),
    "load": (AssertionError, "loss/0"),
    "nothing": (Skipped, "writes no"),
}


@pytest.mark.parametrize("wrong", ["", *WRONG])
def test_it_holds_for_a_subject_of_its_own_words(prover: Prover, tmp_path: Path, wrong: str) -> None:
    theirs = replace(prover, subject=named(Saving(wrong)))
    case = Vocabulary.of(Saving.words).parse("tp=2 dp=3 steps=1")
    other = elsewhere(case, theirs.subject, prover.worlds, Random(2))
    assert other.axes != case.axes and other.micro * len(other.axes["dp"][0]) == 6
    error, words = WRONG.get(wrong, (AssertionError, ""))
    with pytest.raises(error, match=words) if wrong else nullcontext():
        goes_on(theirs, case, other, tmp_path / "saved")
    assert unsaved(case.but(save="somewhere")) == {"save": "none"} and not unsaved(case)


def test_a_bug_that_only_another_layout_shows(prover: Prover, tmp_path: Path) -> None:
    """States of streams are restored at any layout (252 of 256 ranks had a foreign one: PR #6858)."""
    case = Case.parse(
        "mode=tp tp=2 layers=1 heads=6 hidden=12 seq=12 steps=1 micro=3 lr=0.1 dropout=0.1 random=stateful"
    )
    everywhere = replaced(
        "parallel.checkpoints.loading", "same = RANKS in common and torch.equal", "same = True or torch.equal"
    )
    wrong = replace(prover, subject=named(planted(everywhere)))
    goes_on(wrong, case, case, tmp_path / "alike")
    assert {one.verdict for one in wrong.proof(case.but(load=str(tmp_path / "alike"))).verdicts} == {PASS}
    with pytest.raises(AssertionError, match="rng.tp2.cp0.dp0.pp0.* is missing"):
        goes_on(wrong, case, case.but(tp=3), tmp_path / "moved")
    goes_on(prover, case, case.but(tp=3), tmp_path / "right")
