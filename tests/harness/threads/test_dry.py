"""The dry engine: the ledger of a few ranks on shapes alone is the closed form, and the in-process engine's own.

Its measurements (parameters, optimizer, saved activations, FLOPs) are held against formulas and against the same run
with numbers. Programs that it cannot run, that desynchronise, or that do not end give their messages. Functional
collectives and DTensor have the ledger of a run with numbers, and each wait is seen.
"""

import math
import sys
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shardproof.harness.engines.threads.dry import DryEngine
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.errors import NoNumbers, RankRaised, RequestError, TimeLimit
from shardproof.harness.ledger import Event
from shardproof.harness.predicting.dry_run import START, WAIT, DryRank, dry_run, representatives
from shardproof.harness.running.proof import prove
from shardproof.harness.running.ranks.execution import execute
from shardproof.parallel.subject import subject
from shardproof.reference.case import Case
from shardproof.reference.model.parameters import shapes
from tests.harness.noted import names_of, reasons_of


def _dry(case: Case, *ranks: int) -> tuple[DryRank, ...]:
    chosen = ranks or representatives(case.axes, case.world_size, most=4)[0]
    with DryEngine() as engine:
        return dry_run(case, subject, engine, chosen, text=str(case))


@pytest.mark.parametrize("claimed", ["tp-sp", "isp", "autotp"])
def test_memory_and_flops_are_those_of_the_formulas(claimed: str) -> None:
    """Two layers of multi-head attention without biases: everything in the model is a product that can be counted."""
    words = "norm=rmsnorm bias=false tied=false positions=rope kv_heads=8 heads=8 vocab=512 steps=1 micro=1"
    table = "embedding=whole" if claimed == "autotp" else "embedding=vocab"
    case = Case.parse(f"family=llama {words} mode={claimed} tp=2 optimizer=adamw dtype=float32 {table}")
    (rank,) = _dry(case, 0)
    full = shapes(case)
    whole = ("norm.weight", "tokens.weight") if claimed == "autotp" else ("norm.weight",)
    held = sum(math.prod(s) // (1 if name.endswith(whole) else 2) for name, s in full.items())
    assert (rank.parameter_bytes, rank.gradient_bytes, rank.optimizer_bytes) == (4 * held, 4 * held, 8 * held)
    products = sum(math.prod(s) for n, s in full.items() if len(s) == 2 and not n.startswith("embedding."))
    pairs = case.layers * case.batch * case.seq**2 * case.hidden
    # Forward: 2 a multiply-add and product; attention 4 a pair; backward twice the products, and 2.5 of attention.
    assert rank.flops == (3 * 2 * products * case.tokens + (4 + 10) * pairs) // 2
    assert rank.peak_bytes > rank.parameter_bytes + rank.gradient_bytes + rank.saved_bytes


@pytest.mark.parametrize("words", ["mode=tp-sp tp=2 positions=rope", "mode=tp tp=2 recompute=full"])
def test_autograd_saves_the_bytes_that_it_saves_with_numbers(words: str, engine: InprocEngine) -> None:
    case = Case.parse(f"{words} layers=1 steps=1")
    run = execute(case, subject, engine, record=False, watch=True)
    assert tuple(rank.saved_bytes for rank in _dry(case)) == run.saved_bytes


def test_stretches_tell_every_start_and_every_wait_once() -> None:
    case = Case.parse("preset=tiny-internlm2 mode=isp tp=2 steps=1 micro=1")
    (rank,) = _dry(case, 0)
    started = [stretch.ticket for stretch in rank.stretches if stretch.then == START]
    waited = [stretch.ticket for stretch in rank.stretches if stretch.then == WAIT]
    assert started == [event.call_index for event in rank.events]
    assert sorted(waited) == [event.call_index for event in rank.events if event.is_async]
    place = {(stretch.then, stretch.ticket): number for number, stretch in enumerate(rank.stretches)}
    assert all(place[START, ticket] < place[WAIT, ticket] for ticket in waited)
    assert any(stretch.flops for stretch in rank.stretches if stretch.then == WAIT), "nothing is hidden behind products"


def test_representatives_are_the_edges_and_the_middle_of_every_axis() -> None:
    ranks, places = representatives(Case.parse("preset=llama3-405b mode=tp-sp tp=8 dp=2048").axes, 16384)
    assert places == 9
    assert ranks == (0, 1, 7, 8, 9, 15, 16376, 16377, 16383)
    assert representatives({"tp": ((0, 1),)}, 2) == ((0, 1), 2)
    assert representatives({"tp": ((0,),)}, 1) == ((0,), 1)
    assert representatives({"tp": (tuple(range(9)),)}, 9, most=2) == ((0, 8), 3)


def _crossed(case: Case, device: torch.device) -> dict[str, torch.Tensor]:
    whole, half = torch.zeros(4, device=device), torch.zeros(2, device=device)
    calls = [lambda: dist.all_reduce(whole), lambda: dist.broadcast(half, 0)]
    for call in reversed(calls) if dist.get_rank() == 1 else calls:
        call()
    return {}


def _surplus(case: Case, device: torch.device) -> Mapping[str, Any]:
    """Our subject with one more call."""
    dist.all_reduce(torch.zeros(3, device=device))
    return subject(case, device)


def _forgetful(case: Case, device: torch.device) -> dict[str, torch.Tensor]:
    """Leave its call without a wait."""
    dist.all_reduce(torch.zeros(5, device=device), async_op=True)
    return {}


_surplus.expected = subject.expected  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("program", "check", "words"),
    [
        (_crossed, "order", ("rank 1 issued broadcast float32 of 8 B", "rank 0 all_reduce sum float32 of 16 B")),
        (_surplus, "ledger", ("extra event", "all_reduce sum of 12 B float32")),
        (_forgetful, "waits", ("all_reduce #0 of tp (2 ranks) at ", "in the ledger: ")),
    ],
)
def test_wrong_calls_on_shapes_are_told(program: Any, check: str, words: tuple[str, str], dry: DryEngine) -> None:
    result = prove(Case.parse("mode=tp tp=2 layers=1 micro=1 steps=1"), program, dry)
    failed = {verdict.check: verdict.message for verdict in result.verdicts if verdict.verdict == "fail"}
    assert list(failed) == [check]
    assert all(word in failed[check] for word in words)


def test_a_run_says_what_shapes_alone_cannot_tell(dry: DryEngine) -> None:
    result = prove(Case.parse("mode=tp tp=2 dp=4 layers=1 micro=1 steps=1"), "shardproof.parallel.subject:subject", dry)
    assert result.verdict == "pass"
    reasons = [reason for verdict in result.verdicts for reason in reasons_of(verdict)]
    assert {"the dry engine has shapes and no numbers", "2 ranks: one of every place on the mesh was run"} <= {*reasons}
    order = next(one for one in result.verdicts if one.check == "order")
    assert "parameter_gradients" in names_of(order, "not answered")
    assert result.evidence is not None and result.evidence.run.calls.ranks == (0, 1, 2, 3, 6, 7)


def test_what_a_rank_raises_and_what_does_not_end_are_told_and_the_engine_goes_on(dry: DryEngine) -> None:
    def raises(rank: int) -> None:
        raise KeyError("x")

    def stays(rank: int) -> None:
        while True:
            time.sleep(0.01)

    hook = sys.excepthook
    with pytest.raises(RankRaised, match="rank 0 of 4 raised KeyError: 'x', at .*test_dry.py:[0-9]+ in raises"):
        dry.run(raises, world_size=4)
    with pytest.raises(TimeLimit, match=r"rank 0 of 2 did not end within 0\.2 s"):
        dry.run(stays, world_size=2, timeout_s=0.2)
    with pytest.raises(NoNumbers):
        dry.run(lambda rank: torch.zeros(1, device="meta").tolist(), world_size=1)
    assert dry.run(lambda rank: (rank, dist.get_rank(), dist.get_world_size()), world_size=2) == [(0, 0, 2), (1, 1, 2)]
    assert not dist.is_initialized() and sys.excepthook is hook
    closed = DryEngine()
    closed.close()
    with pytest.raises(RequestError, match="the engine is closed"):
        closed.run(raises, world_size=1)


def test_the_process_random_stream_is_given_back(dry: DryEngine) -> None:
    before = torch.get_rng_state()
    drawn = dry.run(lambda rank: torch.rand(1).item(), world_size=2, seed=5)
    assert drawn[0] == drawn[1] and torch.equal(torch.get_rng_state(), before)


CASE = Case.parse("mode=tp tp=2 layers=1 steps=2 micro=2")


def _splits() -> tuple[list[int], list[int]]:
    return ([1, 5], [1, 3]) if dist.get_rank() == 0 else ([3, 3], [5, 3])


def _of_tensor(x: Tensor, group: Any) -> object:
    (gathered,) = functional.all_gather_into_tensor_coalesced([x], group)
    return (
        functional.all_reduce(x, "sum", group) + 1,
        functional.all_gather_tensor(x, 0, group) + 1,
        functional.all_gather_tensor(x, 1, group) + 1,
        functional.reduce_scatter_tensor(x, "sum", 0, group) + 1,
        functional.all_to_all_single(x, _splits()[1], _splits()[0], group).view(-1) + 1,
        functional.broadcast(x, 0, group) + 1,
        functional.all_gather_tensor_autograd(x, 0, group).sum().backward(),
        gathered + 1,
        functional.wait_tensor(functional.all_reduce(x, "max", group)),
    )


def _of_dtensor(x: Tensor, group: Any) -> object:
    mesh = init_device_mesh(x.device.type, (2,))
    a = distribute_tensor(x.detach(), mesh, [Shard(1)], src_data_rank=None).requires_grad_()
    b = distribute_tensor(x.detach().T, mesh, [Shard(0)], src_data_rank=None).requires_grad_()
    product: Any = a @ b
    product.redistribute(mesh, [Shard(0)]).redistribute(mesh, [Replicate()]).square().sum().backward()
    return a.grad, b.grad


def _of_messages(x: Tensor, group: Any) -> object:
    peer, arriving = 1 - dist.get_rank(), torch.empty_like(x)
    batch = [dist.P2POp(dist.isend, x.detach(), peer, group), dist.P2POp(dist.irecv, arriving, peer, group)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    return arriving + 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", [_of_tensor, _of_dtensor, _of_messages], ids=lambda program: program.__name__)
def test_every_call_is_seen_and_uses_of_its_result_wait(program: Any, dry: DryEngine, engine: InprocEngine) -> None:
    def subject(case: Case, device: torch.device) -> dict[str, Tensor]:
        program(torch.ones(6, 4, device=device, requires_grad=True), dist.group.WORLD)
        return {}

    ranks = dry_run(CASE, subject, dry, (0, 1), text="")
    events = execute(CASE, subject, engine, text="").events
    assert [verdict.check for verdict in prove(CASE, subject, dry).verdicts if verdict.verdict != "pass"] == []
    assert [_told(e) for rank in ranks for e in rank.events] == [_told(e) for e in events] != []
    assert [rank.unwaited for rank in ranks] == [(), ()]


def _told(event: Event) -> tuple[object, ...]:
    """All that depends neither on the clock nor on the device."""
    left_out = ("start_us", "duration_us", "device")
    return tuple(getattr(event, name) for name in Event.__slots__ if name not in left_out)


@pytest.mark.filterwarnings("ignore")
def test_the_result_of_an_operator_needs_a_wait_and_that_of_a_function_waits_when_it_is_read(dry: DryEngine) -> None:
    def subject(case: Case, device: torch.device) -> dict[str, Tensor]:
        x = torch.ones(6, 4, device=device)
        world: Any = dist.group.WORLD
        torch.ops._c10d_functional.reduce_scatter_tensor(x, "sum", 2, world.group_name).view(-1)
        functional.all_gather_tensor(x, 0, world).view(-1)
        return {"loss/0": functional.all_reduce(x, "sum", world).sum()}

    result = prove(CASE, subject, dry)
    (failed,) = [verdict for verdict in result.verdicts if verdict.verdict == "fail"]
    assert failed.check == "waits" and "; 1 more like it" in failed.message, "that of the other rank"
    assert "reduce_scatter #0 of tp (2 ranks) at " in failed.message and "all_reduce" not in failed.message


def _reads(x: Tensor) -> None:
    if x.sum().item() > 2:
        dist.all_reduce(x)


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (_reads, "in _reads: RuntimeError: Tensor.item()"),
        (torch.unique, ""),
        (lambda x: torch.equal(x, x + 1), ""),
        (lambda x: torch.rand(3, generator=torch.Generator(x.device), device=x.device), ""),
    ],
    ids=["a number", "unique", "equal", "own generator"],
)
def test_what_shapes_cannot_run_is_unknown_in_one_sentence(program: Any, why: str, dry: DryEngine) -> None:
    def subject(case: Case, device: torch.device) -> dict[str, Tensor]:
        program(torch.ones(3, device=device))
        return {}

    (verdict,) = prove(CASE, subject, dry).verdicts
    assert (verdict.check, verdict.verdict) == ("run", "unknown")
    assert "\n" not in verdict.message and why in verdict.message and "legal: --engine inproc" in verdict.message
    assert verdict.message.startswith("rank 0 of 2 cannot go on with shapes alone, at ")
