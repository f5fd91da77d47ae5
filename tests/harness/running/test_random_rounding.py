"""Random rounding moves computed numbers alone, and values before the first step are seen."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional

from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.recording.capturing.drawn_values import FirstValues, first_values
from shardproof.harness.recording.capturing.operator_probes import NarrowProbe
from shardproof.harness.running.truth.control_modes import AMPLIFIED, PERTURBED, partial_sums
from shardproof.harness.running.truth.of_dtype import Forward
from shardproof.harness.running.truth.random_rounding import RandomRounding
from shardproof.harness.torch_internals.dispatch import DispatchMode

UNIT = torch.finfo(torch.float32).eps
X = torch.randn(40, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def off(moved: Tensor, exact: Tensor) -> float:
    """The largest error in epsilons of float32, relative to the rms."""
    return float((moved - exact).abs().max() / exact.square().mean().sqrt()) / UNIT


def test_what_computes_is_moved_by_half_an_epsilon_and_what_chooses_or_copies_is_not() -> None:
    with RandomRounding({torch.float64: UNIT}):
        computed, product = X.exp(), X @ X.T
        kept = [X.relu(), X.t().clone(), X[:, 3:], torch.cat([X, X]), X.masked_fill(X > 0, 1.0), X.to(torch.float64)]
        constants = torch.linspace(0.1, 0.7, 5, dtype=torch.float64)
        whole = (X > 0).double() + (X < 0).double()
        narrower = X.float()
    assert 0.1 < float(((computed / X.exp()) - 1).abs().max()) / UNIT <= 0.5
    assert 0.3 < off(product, X @ X.T) < 20, "a sum of thirty products rounds more than its result"
    exact = [X.relu(), X.t(), X[:, 3:], torch.cat([X, X]), X.masked_fill(X > 0, 1.0), X]
    assert all(torch.equal(a, b) for a, b in zip(kept, exact, strict=True))
    assert torch.equal(constants, torch.linspace(0.1, 0.7, 5, dtype=torch.float64))
    assert bool((whole == 1).all()) and torch.equal(narrower, X.float())


def test_inputs_stay_where_a_truth_follows_the_dtype_and_what_follows_from_parameters_does_not() -> None:
    w = X[:, :5].clone().requires_grad_()
    with RandomRounding({torch.float64: UNIT}, inputs=False):
        table = X.exp() * 3
        loss = (table.T @ w).square().mean()
    assert torch.equal(table, X.exp() * 3)
    assert float(loss.detach()) != float(((X.exp() * 3).T @ w).square().mean().detach())


def test_labels_in_a_wider_dtype_are_no_rounding_and_a_product_without_parameters_is() -> None:
    narrow = X.bfloat16()
    with RandomRounding({torch.float64: torch.finfo(torch.bfloat16).eps}, inputs=False):
        labels = (narrow.double().sigmoid() * 700).long()
        product = (narrow.double() @ X.T).exp()
    assert torch.equal(labels, (narrow.double().sigmoid() * 700).long())
    assert not torch.equal(product, (narrow.double() @ X.T).exp())


@pytest.mark.parametrize("of", [lambda: X @ X[0], lambda: X[:, 0].dot(X[:, 1]), lambda: torch.addmv(X[:, 0], X, X[0])])
def test_products_with_vectors_are_cut_into_partial_sums_too(of: Callable[[], Tensor]) -> None:
    with partial_sums(3):
        cut = of()
    assert cut.shape == of().shape and 0 < float((cut - of()).abs().max()) < 1e-13


def test_numbers_that_leave_a_lower_precision_are_moved_and_what_is_written_is_written() -> None:
    wide, low = torch.zeros(40, 30, dtype=torch.float64), torch.zeros(40, 30, dtype=torch.bfloat16)
    eps = torch.finfo(torch.bfloat16).eps
    with RandomRounding({torch.bfloat16: eps}, leaving=True):
        low.copy_(X)
        wide.copy_(low)
        nothing = X + 0 * X.bfloat16().double()
    assert bool(low.any()), "the buffer itself was written"
    assert 0 < float((wide / low.double() - 1).abs().max()) <= eps
    assert torch.equal(nothing, X), "a precision that reaches nothing moves nothing"


def test_a_parameter_is_seen_as_training_begins_with_it() -> None:
    with FirstValues() as seen:
        layer = torch.nn.Linear(6, 3, dtype=torch.float64)  # its memory is not set when the parameter is made
        torch.nn.init.normal_(layer.weight)
        begun = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
        for _ in range(2):
            optimizer.zero_grad()
            torch.utils.checkpoint.checkpoint(layer, X[:, :6], use_reentrant=False).square().mean().backward()
            optimizer.step()
    after = {f"param/{name}": parameter.detach() for name, parameter in layer.named_parameters()}
    own, found = first_values({**after, **seen.found})
    assert own.keys() == after.keys() and all(torch.equal(found[name], begun[name]) for name in begun)


@pytest.mark.parametrize("trained", [False, True])
def test_training_begins_with_weights_that_are_loaded_after_a_first_call(*, trained: bool) -> None:
    """A model is called to find its shapes, and then its weights are set in place."""
    with FirstValues() as seen:
        layer = torch.nn.Linear(6, 3, dtype=X.dtype)
        layer(X[:, :6])
        torch.nn.init.constant_(layer.weight, 0.25)
        for _ in range(2 * trained):
            layer(X[:, :6]).sum().backward()
            torch.optim.SGD(layer.parameters(), lr=0.1).step()
        layer(X[:, :6])
    (found, _) = seen.found.values()
    assert bool((found == 0.25).all())


def test_parameters_that_share_memory_are_seen_each_by_itself() -> None:
    rows = [torch.nn.Parameter(row) for row in X.clone()[:2]]
    with FirstValues() as seen:
        (rows[0] * rows[1]).sum().backward()
    assert [bool((value == X[place]).all()) for place, value in enumerate(seen.found.values())] == [True, True]


def test_leaves_that_are_made_anew_in_every_step_are_later_values() -> None:
    w, b = X[:, :6].clone(), torch.zeros(6, dtype=X.dtype)
    begun = {"w": w, "b": b}
    with FirstValues() as seen:
        for step in range(3):
            leaves = [each.clone().requires_grad_() for each in (w, b)]
            gradients = torch.autograd.grad((X[:, :6] * leaves[0] + leaves[1]).square().mean(), leaves)
            w, b = (old.detach() - 0.1**step * new for old, new in zip(leaves, gradients, strict=True))
        other = torch.nn.Linear(6, 40, bias=False, dtype=X.dtype)  # of a second model, which is read later
        first = other.weight.detach().clone()
        other(X[:, :6]).sum().backward()
    after = {"param/w": w, "param/b": b, "param/other": first + 1e-3}
    found = first_values({**after, **seen.found})[1]
    assert all(torch.equal(found[name], value) for name, value in {**begun, "other": first}.items())


def test_values_that_are_as_near_as_others_are_no_first_values() -> None:
    after = torch.full((4,), 1.0)
    assert first_values({"param/w": after, "started/0": after - 0.1, "started/1": after + 0.11})[1] == {}
    assert first_values({"param/w": after, "started/0": after - 0.1, "started/1": after - 0.1})[1].keys() == {"w"}


def moved_norm(rank: int, moved: bool) -> Tensor:
    """The norm of a DTensor in bfloat16, whose sum over ranks is waited for when it is read."""
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    split = distribute_tensor(X, mesh, [Shard(0)], src_data_rank=None).bfloat16()
    units = {torch.bfloat16: torch.finfo(torch.bfloat16).eps} if moved else {}
    with RandomRounding(units, leaving=True):
        norm: Tensor = split.norm().full_tensor()
    return norm


def test_a_sum_over_ranks_is_not_touched_before_it_has_arrived(engine: InprocEngine) -> None:
    plain, moved = (engine.run(moved_norm, which, world_size=2, seed=0, timeout_s=60)[0] for which in (False, True))
    assert float(moved) == pytest.approx(float(plain), rel=4 * torch.finfo(torch.bfloat16).eps)


def train_with_sparse_tensors(dtype: torch.dtype) -> Tensor:
    """The table of an embedding bag after a step and its sparse gradient, behind a product with each sparse layout.

    And behind a tensor of MKLDNN, which shows no storage.
    """
    table = X[:, :8].to(dtype).clone().requires_grad_()
    rows = functional.embedding_bag(torch.arange(60).view(20, 3) % 40, table, mode="mean", sparse=True)
    mixing = X[:20, :20].relu().to(dtype)
    for matrix in (mixing.to_sparse(), mixing.to_sparse_csr()):
        rows = torch.sparse.mm(matrix, rows.tanh())
    rows = rows.to_mkldnn().to_dense()
    (rows @ rows.T).double().square().mean().backward()
    torch.optim.SparseAdam([table], lr=0.1).step()
    assert table.grad is not None
    return torch.stack([table.detach(), table.grad.to_dense()]).double()


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_gradients_and_matrices_are_taken_in_every_run_and_moved_by_rounding() -> None:
    dtype = torch.float32
    right = train_with_sparse_tensors(dtype)
    for mode in (FirstValues(), NarrowProbe(), NarrowProbe(constants=False), Forward()):
        with mode:
            assert torch.equal(train_with_sparse_tensors(dtype), right)
    moves: list[AbstractContextManager[DispatchMode]] = [partial_sums(p) for p in (2, 3, PERTURBED[0], AMPLIFIED[0])]
    for moved in (*moves, RandomRounding({dtype: UNIT}, inputs=False, leaving=True)):
        with moved:
            after = train_with_sparse_tensors(dtype)
        assert 0 < float((after - right).norm() / right.norm()) < 100 * UNIT


def test_a_square_parameter_that_is_read_transposed_keeps_its_first_value() -> None:
    weight = torch.randn(5, 5, requires_grad=True)
    with FirstValues() as probe:
        X[:5, :5].float() @ weight
        turned = weight.detach().t().requires_grad_()  # a leaf of the same memory, as hand-written backwards make one
        X[:5, :5].float() @ turned
    assert torch.equal(first_values({"param/w": weight.detach(), **probe.found})[1]["w"], weight)
