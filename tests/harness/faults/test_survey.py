"""A survey proves collectives necessary and names those that are not; what it calls equivalent is never noticed."""

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardproof.harness.checking.checks import CHECKS
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.errors import RequestError
from shardproof.harness.faults import KINDS, Fault, faults_of, softmax_shift
from shardproof.harness.plain_case import Vocabulary
from shardproof.harness.protocols import Shard
from shardproof.harness.running.injecting import UNREAD, FaultResult, proof_of, survey_faults, unproved_collectives
from shardproof.harness.running.ranks.execution import execute
from shardproof.harness.subject import case_of, resolve_subject
from shardproof.parallel.subject import subject
from shardproof.reference.case import Case
from tests.harness import own_words, toy_subjects

TINY = "layers=1 heads=4 kv_heads=4 hidden=16 ffn=16 seq=8 steps=2 micro=2 batch=2"
TP = Case.parse(f"mode=tp tp=2 {TINY}")
DEAD = "dead traffic: no later call and nothing that is returned depends on the result"
ISP = Case.parse(f"preset=tiny-internlm2 mode=isp tp=2 {TINY} vocab=264 steps=1 micro=1")


def faults(engine: InprocEngine, case: Any, *kinds: str, subject: Callable[..., Any] = subject) -> list[Fault]:
    """Faults of these kinds, of every kind if none is named, of all calls of the subject."""
    events = execute(case, subject, engine, text="").events
    return list(faults_of(events, case.axes, kinds=kinds or KINDS))


def survivors(results: list[FaultResult]) -> list[str]:
    return [str(result.fault) for result in results if result.survived]


def test_every_fault_of_a_mode_is_killed_or_proved_equivalent(engine: InprocEngine) -> None:
    chosen = [fault for fault in faults(engine, TP) if fault.target.phase == "loss"]
    assert {fault.kind for fault in chosen} == {"drop", "double", "op", "stale", "delay", "poison"}
    results = survey_faults(TP, subject, engine, faults=chosen, first_only=True)
    assert survivors(results) == []
    assert len([result for result in results if result.equivalent and subject.harmless(TP, result.fault)]) == 3
    assert unproved_collectives(results) == []


@pytest.mark.deep("three CPU seconds")
def test_what_is_proved_equivalent_is_never_killed(engine: InprocEngine) -> None:
    everything = faults(engine, TP, "double", "op", "stale", "delay", "drop")
    equivalent = [fault for fault in everything if proof_of(fault) or subject.harmless(TP, fault)]
    assert {fault.kind for fault in equivalent} == {"double", "op", "stale"}
    unspoken = functools.partial(subject.__call__)  # it knows nothing of its mathematics
    assert not [str(r.fault) for r in survey_faults(TP, unspoken, engine, faults=equivalent, rules=()) if r.killed]


@pytest.mark.deep("three CPU seconds")
def test_the_gather_that_internevo_does_not_need_is_named_and_nothing_else(engine: InprocEngine) -> None:
    gathers = [fault for fault in faults(engine, ISP, "drop", "poison") if fault.target.op == "all_gather"]
    assert len(gathers) > 20
    results = survey_faults(ISP, subject, engine, faults=gathers, first_only=True)
    found = [(str(collective.target), collective.why) for collective in unproved_collectives(results)]
    assert found == [("all_gather wp backward embedding #0", DEAD)]


def test_the_last_sum_of_a_recomputed_layer_is_dead_traffic(engine: InprocEngine) -> None:
    case = TP.but(recompute="full")
    sums = [f for f in faults(engine, case, "drop", "poison", "stale") if f.target.phase == "recompute"]
    assert {fault.target.region for fault in sums} == {"layers.0.attention.wo", "layers.0.mlp.w2"}
    results = survey_faults(case, subject, engine, faults=sums, first_only=True)
    assert survivors(results) == []
    assert {result.fault.target.region for result in results if result.equivalent == UNREAD} == {"layers.0.mlp.w2"}
    found = [(str(collective.target), collective.why) for collective in unproved_collectives(results)]
    assert found == [("sum all_reduce tp recompute layers.0.mlp.w2 #0", DEAD)]


def wasteful(case: Case, device: torch.device) -> dict[str, Any]:
    """Our subject, and after it four collectives.

    The first is superfluous, the result of the second is unused, the result of the third is returned and looked at by
    no check. The last gives every rank what it has anyway times one.
    """
    outcome: dict[str, Any] = dict(subject(case, device))
    loss = outcome["loss/0"].clone()
    dist.all_reduce(loss, dist.ReduceOp.MAX)
    unseen = torch.tensor([1.0 + dist.get_rank()])
    dist.all_reduce(unseen, dist.ReduceOp.MIN)
    unknown = torch.tensor([7 + dist.get_rank()])
    dist.all_reduce(unknown, dist.ReduceOp.BAND)
    own = Shard(local=unknown, offsets=(dist.get_rank(),), global_shape=(2,))
    steps = torch.tensor([1.0])
    dist.all_reduce(steps, dist.ReduceOp.PRODUCT)
    return {**outcome, "loss/0": loss * steps, "log/own": own}


def test_redundant_and_unseen_collectives_are_told_apart(engine: InprocEngine) -> None:
    everything = faults(engine, TP, "drop", "poison", subject=wasteful)
    chosen = [
        f for f in everything if f.target.reduce_op in {"max", "min", "band", "product"} and f.target.phase != "loss"
    ]
    assert len(chosen) == 8
    results = survey_faults(TP, wasteful, engine, faults=chosen, first_only=True)
    assert {c.target.reduce_op: c.why.partition(":")[0] for c in unproved_collectives(results)} == {
        "max": "redundant",
        "min": "dead traffic",
        "band": "dead traffic or a blind spot",
        "product": "redundant",
    }


def test_ranks_that_do_not_even_finish_are_noticed_by_the_run(engine: InprocEngine) -> None:
    poisons = [fault for fault in faults(engine, TP, "poison") if fault.target.op == "broadcast"]
    results = survey_faults(TP, subject, engine, faults=poisons)
    assert ("run",) in [result.killed_by for result in results]
    assert all(result.killed for result in results)


def test_a_subject_that_fails_undisturbed_is_refused(engine: InprocEngine) -> None:
    with pytest.raises(RequestError, match="the subject does not finish undisturbed: rank 0 of 2 raised ZeroDivision"):
        survey_faults(TP.but(seed=13), toy_subjects.raising, engine)
    with pytest.raises(RequestError, match="no check passes undisturbed"):
        survey_faults(TP, toy_subjects.empty, engine, checks={"coverage": CHECKS["coverage"]})


class Counting(own_words.Network):
    """Waits for as long as a number that it gets from rank 0 is large."""

    def __call__(self, case: Any, device: torch.device) -> Any:
        outcome = super().__call__(case, device)
        turns = torch.ones(1, dtype=torch.int64)
        dist.broadcast(turns, src=0)
        while turns > 1:
            time.sleep(0.01)
        return outcome


def test_a_program_that_no_longer_ends_is_noticed(engine: InprocEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardproof.harness.running.injecting._LEAST_S", 0.2)
    case, endless = Vocabulary.of(own_words.WORDS).parse("tp=2 steps=1 micro=1"), Counting()
    poison = next(fault for fault in faults(engine, case, "poison", subject=endless) if fault.target.op == "broadcast")
    (result,) = survey_faults(case, endless, engine, faults=[poison], timeout_s=60.0)
    assert (result.killed_by, result.machine) == (("run",), "")
    monkeypatch.setattr("shardproof.harness.running.injecting._LEAST_S", 60.0)
    (result,) = survey_faults(case, endless, engine, faults=[poison], timeout_s=0.3)
    assert result.killed_by == () and "no end within 0.3 s" in result.machine


def vocabulary_loss(case: Any, device: torch.device) -> Any:
    """Negative log likelihoods over a vocabulary that is cut over tp."""
    generator = torch.Generator().manual_seed(case.seed)
    logits, labels = torch.randn(7, 12, generator=generator).double(), torch.arange(7)
    first, part = case.axis_rank("tp", dist.get_rank()) * 12 // case.tp, 12 // case.tp
    mine = logits[:, first : first + part]
    largest = mine.max(1).values
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    summed = (mine - largest[:, None]).exp().sum(1)
    dist.all_reduce(summed)
    here = (labels >= first) & (labels < first + part)
    picked = torch.where(here, mine.gather(1, (labels - first).clamp(0, part - 1)[:, None])[:, 0], 0.0)
    dist.all_reduce(picked)
    return {"loss/0": (summed.log() + largest - picked).mean()}


def test_the_maximum_of_a_softmax_may_be_another_number_that_all_ranks_have(engine: InprocEngine) -> None:
    known = Vocabulary.of({})
    case, alone = known.parse("tp=3 steps=1 micro=1"), known.parse("steps=1 micro=1")

    def truth(_case: Any, device: torch.device) -> Any:
        (outcome,) = engine.run(lambda rank: vocabulary_loss(alone, device), world_size=1, seed=0)
        return outcome

    class Vocabularies:
        words, cases = {"steps": 1}, ("tp=3",)
        harmless: Any = None

        def __call__(self, case: Any, device: torch.device) -> Any:
            return vocabulary_loss(case, device)

    plain, declared = Vocabularies(), Vocabularies()
    plain.truth = declared.truth = staticmethod(truth)  # type: ignore[attr-defined]
    declared.harmless = softmax_shift
    maxima = [fault for fault in faults(engine, case, subject=plain) if fault.target.reduce_op == "max"]
    assert {fault.kind for fault in maxima} >= {"drop", "op", "stale", "poison"}
    undeclared = survey_faults(case, plain, engine, faults=maxima)
    proved = {
        str(one.fault) for one in survey_faults(case, declared, engine, faults=maxima) if "softmax" in one.equivalent
    }
    assert proved and proved == {str(one.fault) for one in undeclared if one.survived}


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_unmodified_megatron_needs_every_collective_and_a_doubled_sum_is_noticed(engine: InprocEngine) -> None:
    """Megatron's GPTModel needs each of its 4L + 5 calls."""
    pytest.importorskip("megatron.core", reason="needs the extra `peers`")
    megatron = resolve_subject("shardproof.suites.subjects.megatron:subject")
    case = case_of("tp=2 layers=1 micro=1", megatron)
    chosen = faults(engine, case, "drop", "double", subject=megatron.call)
    results = survey_faults(case, megatron, engine, faults=chosen, first_only=True)
    dropped = [result for result in results if result.fault.kind == "drop"]
    assert len(dropped) == 4 + 5 and all(result.killed for result in dropped)
    assert unproved_collectives(results) == [] == survivors(results)
    assert [str(one.fault) for one in results if one.equivalent] == ["double max all_reduce tp forward #0"]
