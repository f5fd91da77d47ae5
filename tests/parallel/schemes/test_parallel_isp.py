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
from reference.model.parameters import weights
from reference.training import subject as dense
from tests.parallel.ranks import CPU, on_ranks

EVO = "family=internlm2 vocab=264"


def _merged(case: Case) -> Merged:
    return merge(on_ranks(case.world_size, lambda rank: localize(subject(case, CPU))))


def _same(merged: Merged, truth: dict[str, Tensor]) -> None:
    assert merged.flaws == ()
    assert set(merged.tensors) == set(truth)
    for name, expected in truth.items():
        error = (merged.tensors[name] - expected).abs().max()
        assert error <= 1e-12 * expected.abs().max().clamp(min=1e-3), (name, float(error))


@pytest.mark.parametrize(
    "words",
    [
        f"{EVO} tp=4 wp=2 packed=true recompute=full",
        f"{EVO} tp=4 wp=4 kv_heads=2 overlap=false recompute=full head=local",
        f"{EVO} tp=2 dp=2 wp=4 fuse_weights=true recompute=full head=gather",
        f"{EVO} tp=1 dp=4 wp=2 embedding=vocab",
        f"{EVO} tp=3 dp=2 wp=2 heads=6 kv_heads=3 hidden=48 ffn=96 seq=12 vocab=258 batch=3 micro=3 qk_norm=true",
        f"{EVO} tp=2 dp=3 wp=3 heads=4 kv_heads=2 hidden=48 ffn=96 seq=12 vocab=258 fuse_mlp=true fuse_qkv=false",
        "tp=4 wp=2 tied=false embedding=hidden qk_norm=true clip=0.05 optimizer=adamw lr=0.01",
        "tp=2 dp=3 wp=6 heads=4 kv_heads=2 hidden=48 ffn=96 cross_entropy=fused recompute=selective layers=3",
        "tp=2 fuse_weights=true overlap=false recompute=full head=local delivery=tensors",
    ],
)
def test_the_outcome_is_the_dense_outcome(words: str) -> None:
    case = Case.parse(f"mode=isp {words}")
    _same(_merged(case), dense.subject(case, CPU))


@pytest.mark.parametrize("words", ["recompute=none", "recompute=full", "fuse_weights=true", "recompute=selective"])
def test_prefetch_changes_no_bit(words: str) -> None:
    """Overlap and fusion move calls, never numbers."""
    case = Case.parse(f"mode=isp {EVO} tp=2 dp=2 wp=4 {words}")
    plain = _merged(case.but(overlap=False, fuse_weights=False)).tensors
    for name, tensor in _merged(case.but(overlap=True)).tensors.items():
        assert torch.equal(tensor, plain[name]), name


def test_tokens_and_positions_are_slices_and_labels_stay_whole() -> None:
    """Seed 000's shapes; split over ranks and put together the tokens are the micro-batch."""
    case = Case.parse(f"mode=isp {EVO} tp=4 packed=true batch=2")

    def program(rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        state = set_up(case, ISP, Mesh.of(case), CPU)
        whole = deliver(case, state.mesh, 0, 0, CPU)
        local = state.parts.local(whole)
        assert torch.equal(local.labels, whole.labels) and local.attention_mask is not None
        assert local.attention_mask.shape == (1, 1, case.tokens, case.tokens)
        return local.tokens, local.positions, whole.tokens, whole.positions

    found = on_ranks(4, program)
    assert [tuple(tokens.shape) for tokens, *_ in found] == [(1, case.tokens // 4)] * 4
    assert torch.equal(torch.cat([tokens for tokens, *_ in found], 1), found[0][2])
    assert torch.equal(torch.cat([positions for _, positions, *_ in found], 1), found[0][3])


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


def test_every_rank_holds_only_its_share_of_the_weights() -> None:
    case = Case.parse(f"mode=isp {EVO} tp=2 dp=2 wp=4")

    def program(rank: int) -> dict[str, tuple[int, ...]]:
        return {name: tuple(p.shape) for name, p in _state(case).model.named_parameters()}

    whole = {name: tuple(weight.shape) for name, weight in weights(case, CPU).items()}
    for shapes in on_ranks(4, program):
        assert set(shapes) == set(whole)
        assert shapes["embedding.tokens.weight"] == (264, 16)
        assert shapes["head.weight"] == (66, 64)
        for name, shape in shapes.items():
            if "norm" in name:
                assert shape == whole[name]
            elif name.startswith("layers."):
                assert shape == (whole[name][0] // 4, *whole[name][1:])


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
