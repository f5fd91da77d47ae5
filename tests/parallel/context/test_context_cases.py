"""Context parallelism against the dense model over three steps, its ledger against the closed form, and regrouping."""

from __future__ import annotations

from torch import Tensor

from harness.engines.threads.inproc import InprocEngine
from harness.outcome.merging import merge
from harness.running.ranks.execution import execute
from parallel.subject import subject
from reference.case import Case
from tests.parallel.case_tables import CONTEXT, PACKED

GROUPINGS = ((1, 4, 4, 2), (4, 2, 1, 1), (2, 2, 2, 2))
"""dp, cp, micro and pp of the same global batch; 8 ranks."""


def _outcome(dp: int, cp: int, micro: int, pp: int) -> dict[str, Tensor]:
    case = Case.parse(
        f"{CONTEXT.sizes} tp=1 dp={dp} cp={cp} pp={pp} micro={micro} steps=2 seq=16 {PACKED} delivery=local"
        " label_smoothing=0.1"
    )
    with InprocEngine() as engine:
        run = execute(case, subject, engine, text="", record=False)
    return {name: value for name, value in merge(run.outcomes).tensors.items() if not name.startswith("act")}


def test_one_global_batch_is_one_step_however_it_is_grouped() -> None:
    """Over data ranks, context ranks, stages and micro-batches, with other numbers of valid tokens in each of them."""
    alone = _outcome(1, 1, 4, 1)
    assert {"loss/1", "tokens/1", "grad_norm/1", "logits/1"} <= alone.keys()
    for grouping in GROUPINGS:
        found = _outcome(*grouping)
        assert found.keys() == alone.keys()
        far = {
            name: float((value - alone[name]).abs().max() / alone[name].abs().max().clamp(min=1e-9))
            for name, value in found.items()
            if "logits" not in name  # their rows are numbered by data rank
        }
        assert max(far.values()) < 1e-10, (grouping, max(far, key=far.__getitem__))
