"""What flows through an isp model: activations and their gradients are the dense ones, shapes are those of seed 000.

Also how calls are issued: prefetched gathers and reduce-scatters are asynchronous, and precision is the dtype's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.engines.threads.inproc import InprocEngine
from harness.outcome.merging import merge
from harness.running.proof import prove
from harness.running.ranks.execution import execute, execute_captured
from parallel.communication.batch import deliver
from parallel.communication.mesh import Mesh
from parallel.schemes.isp import ISP
from parallel.subject import subject
from parallel.training.loop import set_up
from reference.case import Case
from reference.training import subject as dense
from tests.parallel.ranks import CPU, on_ranks

EVO = "mode=isp family=internlm2 vocab=264 steps=1 micro=1"


@pytest.mark.parametrize(
    "words",
    [
        "tp=4 wp=2 packed=true qk_norm=true",
        "tp=2 dp=3 wp=2 fuse_qkv=false head=local",
        "tp=2 dp=2 wp=4 fuse_weights=true fuse_mlp=true head=gather",
        "tp=2 family=gpt recompute=full",
    ],
)
def test_activations_and_their_gradients_are_the_dense_ones(words: str) -> None:
    case = Case.parse(f"{EVO} {words}")
    with InprocEngine() as engine:
        run = execute_captured(case, subject, engine)
    assert run.problem == ""
    found, truth = merge(run.captured), dense.activations(case, CPU)
    assert found.flaws == ()
    assert set(found.tensors) == set(truth)
    for name, expected in truth.items():
        torch.testing.assert_close(found.tensors[name], expected, rtol=1e-12, atol=1e-12, msg=name)


def _shapes(case: Case) -> list[dict[str, tuple[int, ...]]]:
    """By rank: the shape of every module's output, and of what goes in and out of the core of attention."""

    def program(rank: int) -> dict[str, tuple[int, ...]]:
        state = set_up(case, ISP, Mesh.of(case), CPU)
        found: dict[str, tuple[int, ...]] = {}
        for name, module in state.model.named_modules():
            module.register_forward_hook(lambda _m, _i, y, name=name: found.update({name: tuple(y.shape)}))
        attention: Any = state.model.get_submodule("layers.0.attention")
        exchange = attention.exchange

        def watched(core: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            def inner(*heads: Tensor) -> Tensor:
                found.update({f"{name} own": tuple(x.shape) for name, x in zip("qkv", heads, strict=True)})
                context = core(*heads)
                found["context own"] = tuple(context.shape)
                return context

            found.update({name: tuple(x.shape) for name, x in (("q", q), ("k", k), ("v", v))})
            context: Tensor = exchange(inner, q, k, v)
            found["context"] = tuple(context.shape)
            return context

        attention.exchange = watched
        batch = state.parts.local(deliver(case, state.mesh, 0, 0, CPU))
        found["input_ids"] = tuple(batch.tokens.shape)
        state.model(batch)
        return found

    return on_ranks(case.world_size, program)


def test_shapes_are_those_of_seed_000() -> None:
    """Its isp procedure with sp = 2, wp = 4; logits are exchanged today and were local when the page was written."""
    case = Case.parse(f"{EVO} tp=2 dp=2 wp=4 packed=true batch=2 layers=1")
    whole, own, hidden, dim = case.tokens, case.tokens // 2, case.hidden, case.head_dim
    heads, kv = case.heads, case.kv_heads
    for found in _shapes(case):
        assert found["input_ids"] == (1, own)
        assert found["embedding"] == (1, own, hidden)
        assert found["layers.0.attention.wqkv"] == (1, own, hidden + 2 * dim * kv)
        assert found["q"] == (1, own, heads, dim)
        assert found["k"] == found["v"] == (1, own, kv, dim)
        assert found["q own"] == (1, whole, heads // 2, dim)
        assert found["k own"] == found["v own"] == (1, whole, kv // 2, dim)
        assert found["context own"] == (1, whole, heads // 2, dim)
        assert found["context"] == (1, own, heads, dim)
        assert found["layers.0.attention.wo"] == found["layers.0.mlp.w2"] == (1, own, hidden)
        assert found["layers.0.mlp.w1"] == found["layers.0.mlp.w3"] == (1, own, case.ffn)
        assert found["final_norm"] == (1, own, hidden)
        assert found["head"] == (1, whole, case.vocab // 2)
    assert {found["head"] for found in _shapes(case.but(head="local"))} == {(1, own, case.vocab)}
    assert {found["head"] for found in _shapes(case.but(head="gather"))} == {(1, whole, case.vocab)}
    unpacked = Case.parse(f"{EVO} tp=2 batch=2 layers=1")
    assert {found["input_ids"] for found in _shapes(unpacked)} == {(2, unpacked.seq // 2)}


def test_fewer_kv_heads_than_ranks_are_repeated() -> None:
    """kv_heads // sp would be 0 (modes.md section 7): every rank gets one whole kv head."""
    case = Case.parse(f"{EVO} tp=4 wp=2 kv_heads=2 layers=1")
    for found in _shapes(case):
        assert found["k"] == (2, case.seq // 4, 2, case.head_dim)
        assert found["k own"] == found["v own"] == (2, case.seq, 1, case.head_dim)


@pytest.mark.parametrize("overlap", [True, False])
def test_what_is_prefetched_is_asynchronous(overlap: bool) -> None:
    """Gathers of blocks travel ahead under overlap only; gradients always travel during the next product."""
    case = Case.parse(f"{EVO} tp=2 layers=2").but(overlap=overlap)
    with InprocEngine() as engine:
        events = execute(case, subject, engine, text="").events
    kinds = Counter((e.op, e.is_async) for e in events if e.axis == "wp" and e.region.startswith("layers."))
    assert kinds == {("all_gather", overlap): 2 * 2 * 2 * 5, ("reduce_scatter", True): 2 * 2 * 5}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_low_precision_follows_the_dense_model_in_the_same_dtype(dtype: str) -> None:
    """Dtypes are the dense model's, and numbers within the limits of control runs."""
    case = Case.parse(f"{EVO} tp=2 layers=1 dtype={dtype} lr=0.1")
    with InprocEngine() as engine:
        result = prove(case, subject, engine)
        found = merge(execute(case, subject, engine, text="", record=False).outcomes)
    assert result.verdict == "pass", result.verdicts
    for name, expected in dense.subject(case, CPU).items():
        assert found.tensors[name].dtype == expected.dtype, name
