"""The mode isp against the dense reference, and what is special to it: meshes with tp != wp, few kv heads, memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from harness.outcome.blocks import localize
from harness.outcome.merging import Merged, merge
from parallel.communication.batch import deliver
from parallel.communication.mesh import Mesh
from parallel.schemes.isp import ISP
from parallel.subject import subject
from parallel.training.loop import Rank, set_up
from parallel.weights.linear import WeightLinear
from reference.case import Case
from tests.parallel.ranks import CPU, on_ranks

EVO = "family=internlm2 vocab=264"


def _merged(case: Case) -> Merged:
    return merge(on_ranks(case.world_size, lambda rank: localize(subject(case, CPU))))


@pytest.mark.parametrize("words", ["recompute=none", "recompute=full", "fuse_weights=true", "recompute=selective"])
def test_prefetch_changes_no_bit(words: str) -> None:
    """Overlap and fusion move calls, never numbers."""
    case = Case.parse(f"mode=isp {EVO} tp=2 dp=2 wp=4 {words}")
    plain = _merged(case.but(overlap=False, fuse_weights=False)).tensors
    for name, tensor in _merged(case.but(overlap=True)).tensors.items():
        assert torch.equal(tensor, plain[name]), name


def _state(case: Case) -> Rank:
    return set_up(case, ISP, Mesh.of(case), CPU)


def _step(state: Rank) -> None:
    batch = state.parts.local(deliver(state.case, state.mesh, 0, 0, CPU))
    state.parts.loss(state.model(batch), batch.labels).sum().backward()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_no_gathered_weight_outlives_its_use(recompute: str, overlap: bool, fused: bool) -> None:
    """Autograd saves no tensor as large as a whole weight, and after a micro-batch nothing is held or under way."""
    case = Case.parse(
        f"mode=isp {EVO} tp=2 wp=2 layers=3 bias=true seq=4 batch=1 recompute={recompute} "
        f"overlap={str(overlap).lower()} fuse_weights={str(fused).lower()}"
    )
    smallest = case.hidden * case.hidden

    def program(rank: int) -> tuple[int, bool]:
        state, saved = _state(case), [0]

        def pack(x: Tensor) -> Tensor:
            own = any(
                x.untyped_storage().data_ptr() == p.untyped_storage().data_ptr() for p in state.model.parameters()
            )
            saved[0] = max(saved[0], 0 if own else x.untyped_storage().nbytes() // x.element_size())
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            _step(state)
        linears = [module for module in state.model.modules() if isinstance(module, WeightLinear)]
        return saved[0], all(linear.seat.gathers.idle for linear in linears)

    for largest, idle in on_ranks(2, program):
        assert 0 < largest < smallest
        assert idle


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_wp_must_cut_keys_and_values_evenly(data: st.DataObject) -> None:
    """The rows of wqkv (or of wk and wv) split over wp, or the case says so."""
    wp = data.draw(st.sampled_from((2, 3, 4, 6)))
    kv_heads, dim, fuse = data.draw(st.integers(1, 3)), data.draw(st.sampled_from((1, 2, 4))), data.draw(st.booleans())
    words = f"mode=isp tp=1 dp={wp} wp={wp} positions=learned heads={12 * kv_heads} kv_heads={kv_heads} ffn=24"
    words += f" hidden={12 * kv_heads * dim} fuse_qkv={str(fuse).lower()}"
    rows = kv_heads * dim * (2 if fuse else 1)
    if rows % wp:
        with pytest.raises(ValueError, match=f"wp={wp}: must divide the {rows} rows"):
            Case.parse(words)
    else:
        assert Case.parse(words).wp == wp
