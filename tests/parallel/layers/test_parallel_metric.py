"""The metric: a tie is right on every split, InternEvo's eight calls a micro-batch, no effect on training."""

from collections import Counter

import pytest
import torch
from torch import Tensor

from parallel.communication.layout import Cut, Placement, shard
from parallel.communication.mesh import Axis
from parallel.layers.loss import counted
from parallel.layers.metric import Metric, MetricSums
from parallel.registry import scheme_of
from parallel.subject import subject
from reference.case import Case
from reference.language.modes import MODES
from tests.parallel.ranks import Calls, along_tp, numbers

RANKS, VOCAB, PADDED, ROWS, SEQ = 3, 10, 15, 2, 6
LOGITS = numbers(ROWS, SEQ, VOCAB)
LABELS = torch.tensor([[9, 0, -100, 5, 4, 1], [3, 9, 8, 2, -100, 7]])
WEIGHTS = counted(LABELS, torch.tensor([[1.0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 1, 1]])).double()
LABELS[0, 3], LABELS[1, 2] = LOGITS[0, 3].argmax(), LOGITS[1, 2].argmax()
PLACES = {
    "vocabulary": Placement(shape=LOGITS.shape, cuts=(Cut(axis="tp", dim=2, blocks=(PADDED,)),)),
    "sequence": Placement(shape=LOGITS.shape, cuts=(Cut(axis="tp", dim=1),)),
    "whole": Placement(shape=LOGITS.shape),
}


def _measured(place: Placement, logits: Tensor, calls: Calls | None = None) -> list[MetricSums]:
    def program(axis: Axis) -> MetricSums:
        local = shard(logits, place, {"tp": (axis.rank, axis.size)})
        metric = Metric(place, axis, vocab=VOCAB, sequence_dim=1)
        with torch.no_grad():
            metric(local, LABELS, WEIGHTS)
            metric(2 * local, LABELS, WEIGHTS)
        assert metric.total is not None
        return metric.total

    return along_tp(RANKS, program, observer=calls)


@pytest.mark.parametrize("form", PLACES)
def test_a_tie_is_right_on_every_split(form: str) -> None:
    for found in _measured(PLACES[form], torch.zeros_like(LOGITS)):
        assert found.right == found.tokens
        assert float((-found.log_likelihood / found.tokens).exp()) == pytest.approx(VOCAB)


def _terms(case: Case) -> Counter[tuple[str, str, str, str, str, str, int]]:
    found: Counter[tuple[str, str, str, str, str, str, int]] = Counter()
    for t in subject.expected(case):
        found[(t.phase, t.region, t.op, t.axis, t.reduce_op, t.dtype, t.payload_bytes)] += t.calls
    return found


@pytest.mark.parametrize("name", MODES)
def test_eight_more_calls_a_micro_batch_and_nothing_else_changes(name: str) -> None:
    """modes.md 3.4: 2 MAX fp32 [T], 4 SUM fp32 [T], int64 SUM [1 dataset] and []."""
    case = Case.parse(f"mode={name} tp=4 heads=4 kv_heads=4 dtype=bfloat16 steps=3 micro=2")
    plain, measured = (_terms(c) for c in (case, case.but(metric=True)))
    assert not plain - measured
    more = measured - plain
    if scheme_of(name).activation(case, "head") == Placement(shape=(case.batch, case.seq, case.vocab)):
        assert not more, "every rank has the whole logits"
        return
    assert {line[:4] for line in more} == {("metric", "", "all_reduce", "tp")}
    found = {line[4:]: calls for line, calls in more.items()}
    one, runs = case.tokens * 4, 6
    assert found == {
        ("max", "float32", one): 2 * runs,
        ("sum", "float32", one): 4 * runs,
        ("sum", "int64", 8): 2 * runs,
    }
