"""What-ifs of the metric, held against a trainer that measures some micro-batches alone."""

from __future__ import annotations

import torch
from torch import Tensor

from reference.case import Case
from reference.data.batches import micro_batch
from reference.model import decoder, metric
from reference.training import subject as dense
from reference.what_ifs.inputs import weights_of
from reference.what_ifs.metrics import metrics

CPU = torch.device("cpu")
SIZES = "layers=1 hidden=16 heads=4 ffn=12 vocab=264 seq=8 batch=2 micro=3 steps=2 lr=0.1"
CASE = Case.parse(f"mode=mtp family=internlm2 tp=1 dp=2 metric=true {SIZES}")


def of_some(step: int, micros: tuple[int, ...]) -> dict[str, Tensor]:
    """log_likelihood and tokens [dp] of these micro-batches of a step."""
    weights = weights_of(CASE, CPU)
    if step:
        weights = {name: dense.truth(CASE, CPU)[f"param_after/{step - 1}/{name}"] for name in weights}
    found: dict[str, list[Tensor]] = {"tokens": [], "log_likelihood": []}
    for rank in range(CASE.dp):
        batches = [micro_batch(CASE, step, micro, rank, device=CPU) for micro in micros]
        sums = [metric.totals(decoder.logits(CASE, weights, b), b.labels, b.loss_mask) for b in batches]
        for name, rows in found.items():
            rows.append(torch.stack([one[name] for one in sums]).sum(0))
    return {name: torch.stack(rows) for name, rows in found.items()}


def test_readings_of_some_micro_batches() -> None:
    found, every = metrics(CASE, CPU), (0, 1, 2)
    expected = {
        "newest": [of_some(1, (2,))],
        "oldest": [of_some(0, (0,))],
        "last": [of_some(0, (2,)), of_some(1, (2,))],
        "first": [of_some(0, (0,)), of_some(1, (0,))],
        "last_step": [of_some(1, every)],
        "first_step": [of_some(0, every)],
    }
    for reading, sums in expected.items():
        for name in ("tokens", "log_likelihood"):
            total = torch.stack([one[name] for one in sums]).sum(0)
            torch.testing.assert_close(found[f"micro_missing.{reading}/metric/{name}"], total)
    both = {name: torch.stack([of_some(step, every)[name] for step in (0, 1)]).sum(0) for name in ("log_likelihood",)}
    torch.testing.assert_close(dense.truth(CASE, CPU)["metric/log_likelihood"], both["log_likelihood"])


def test_without_a_metric_there_is_none() -> None:
    assert metrics(CASE.but(metric=False), CPU) == {}
