"""The metric: right numbers however logits are split, InternEvo's eight calls a micro-batch, no effect on training."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from parallel.communication.batch import deliver
from parallel.communication.layout import Cut, Placement, shard
from parallel.communication.mesh import Axis, Mesh
from parallel.layers.loss import counted
from parallel.layers.metric import Metric, MetricSums
from parallel.registry import scheme_of
from parallel.subject import subject
from parallel.training.loop import set_up
from reference.case import Case
from reference.language.modes import MODES
from tests.parallel.ranks import CPU, Calls, along_tp, numbers, on_ranks

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
def test_the_numbers_are_those_of_whole_logits(form: str) -> None:
    """Two micro-batches; dense accuracy, log-likelihood and loss over the tokens that count."""
    both = [LOGITS, 2 * LOGITS]
    right = sum(int(((x.argmax(-1) == LABELS) * WEIGHTS).sum()) for x in both)
    losses = [functional.cross_entropy(x.movedim(-1, 1), LABELS, reduction="none") * WEIGHTS for x in both]
    total = torch.stack(losses).sum()
    assert 2 <= right < 2 * WEIGHTS.sum()
    for found in _measured(PLACES[form], LOGITS):
        assert int(found.right) == right and found.right_of.tolist() == [right]
        assert int(found.tokens) == 2 * int(WEIGHTS.sum())
        torch.testing.assert_close(-found.log_likelihood, total, rtol=1e-13, atol=0)
        torch.testing.assert_close(found.loss_of, total[None], rtol=1e-13, atol=0)
        assert found.accuracy == right / (2 * float(WEIGHTS.sum()))
        assert found.perplexity == pytest.approx(float((total / (2 * WEIGHTS.sum())).exp()), rel=1e-13)


@pytest.mark.parametrize("form", PLACES)
def test_a_tie_is_right_on_every_split(form: str) -> None:
    for found in _measured(PLACES[form], torch.zeros_like(LOGITS)):
        assert found.accuracy == 1
        assert found.perplexity == pytest.approx(VOCAB)


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


def test_it_measures_the_loss_that_is_trained() -> None:
    """Sequence dim first, padded vocabulary, real batches: the mean of the metric is the model's own loss."""
    case = Case.parse("mode=tp-sp tp=2 layers=1 steps=1 seq=8 micro=1 metric=true")

    def program(rank: int) -> tuple[float, float]:
        state, mode = set_up(case, scheme_of(case.mode), Mesh.of(case), CPU), scheme_of(case.mode)
        batch = deliver(case, state.mesh, 0, 0, CPU)
        labels = mode.laid_out(batch.labels)
        weights = counted(labels, mode.laid_out(batch.loss_mask)).double()
        logits = state.model(batch)
        losses = state.parts.loss(logits, labels)
        assert state.metric is not None
        with torch.no_grad():
            measured = state.metric(logits, labels, weights)
        return float((losses.detach() * weights).sum() / weights.sum()), float(measured.loss_of / measured.tokens)

    for trained, measured in on_ranks(2, program):
        assert measured == pytest.approx(trained, rel=1e-13)
