"""A right case passes and a wrong case fails in whatever dtype the truth computes; how an update is judged."""

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.deep import deep
from tests.harness.proofs import contradicted, proved, told, unchecked, verdict_of


def drawn(seed: int, *shape: int, std: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * std


class Rows:
    """A subject that trains a linear layer over dp. With `wide` its truth computes in float64 whatever the case says.

    `grad` changes the gradients of ranks, `inside` the layer's output; `optimizer` makes the optimizer of the
    parameters, and `after` changes it after a step.
    """

    words, cases = {"width": 12, "rows": 6}, ("dp=2",)

    def __init__(self, **changed: Any) -> None:
        self.wide: bool = changed.get("wide", False)
        self.master: bool = changed.get("master", False)
        self.inside: Callable[[Tensor], Tensor] = changed.get("inside", lambda y: y)
        self.grad: Callable[[Tensor], Tensor] = changed.get("grad", lambda g: g)
        self.optimizer: Any = changed.get("optimizer", partial(torch.optim.SGD, lr=0.1))
        self.after: Callable[[Any, int], None] = changed.get("after", lambda optimizer, step: None)

    def truth(self, case: Any, device: torch.device) -> Mapping[str, Tensor]:
        return self.trained(case, torch.float64 if self.wide else getattr(torch, case.dtype), range(case.dp))

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Tensor]:
        return self.trained(case, getattr(torch, case.dtype), [dist.get_rank()], ranks=True)

    def trained(self, case: Any, dtype: torch.dtype, data: Any, *, ranks: bool = False) -> Mapping[str, Tensor]:
        kept = torch.float32 if self.master and dtype.itemsize == 2 else dtype
        start = drawn(case.seed, case.width, case.width, std=0.5).to(getattr(torch, case.dtype)).to(kept)
        w = torch.nn.Parameter(start)
        optimizer, out = self.optimizer([w]), dict[str, Tensor]()
        for step in range(case.steps):
            optimizer.zero_grad()
            losses, picked = [], torch.zeros(case.width, dtype=torch.int64)
            for rank, micro in itertools.product(data, range(case.micro)):
                numbers = case.samples(step, micro, rank, case.rows)
                x = torch.stack([drawn(n + 5000, case.width) for n in numbers]).to(dtype)
                y = self.inside(x @ w.to(dtype).T)
                losses.append((y - x.roll(1, -1)).square().sum() / (case.rows * case.width * case.dp * case.micro))
                losses[-1].backward()
                picked += torch.bincount(y.argmax(-1), minlength=case.width)
            assert w.grad is not None
            total = torch.stack(losses).sum().detach()
            for tensor in (total, w.grad, picked) if ranks else ():
                dist.all_reduce(tensor)
            if ranks:
                w.grad = self.grad(w.grad)
            out |= {f"loss/{step}": total, f"picked/{step}": picked} | ({} if step else {"grad/w": w.grad.clone()})
            optimizer.step()
            if ranks:
                self.after(optimizer, step)
            out[f"param_after/{step}/w"] = w.detach().clone()
        return out


def low(y: Tensor) -> Tensor:
    """The output unchanged, after a computation in bfloat16 that has no effect on it."""
    return y + 0 * y.bfloat16().to(y.dtype)


@pytest.mark.parametrize(
    "text", ["dp=2 dtype=float32", *deep("two CPU seconds", "dp=3 dtype=float32 rows=20"), "dp=2 dtype=bfloat16"]
)
def test_a_truth_in_float64_fails_no_right_case_and_passes_no_wrong_one(text: str) -> None:
    adam = partial(torch.optim.AdamW, lr=0.05)
    result = proved(Rows(wide=True, optimizer=adam), text)
    assert result.verdict == "pass", told(result)
    off = 1.15 if "bfloat16" in text else 1.001
    wrong = proved(Rows(wide=True, optimizer=adam, grad=lambda g: g * off), text, explain=False)
    assert "parameter_gradients" in contradicted(wrong)


def test_a_precision_that_reaches_nothing_widens_no_limit() -> None:
    assert proved(Rows(inside=low), "dp=2").verdict == "pass"
    assert "parameter_gradients" in contradicted(
        proved(Rows(inside=low, grad=lambda g: g * 1.001), "dp=2", explain=False)
    )


def test_a_precision_widens_limits_by_its_effect() -> None:
    def little(y: Tensor) -> Tensor:
        return y + 1e-3 * y.bfloat16().to(y.dtype)

    class Exact(Rows):
        def truth(self, case: Any, device: torch.device) -> Mapping[str, Tensor]:
            return Rows(inside=lambda y: y + 1e-3 * y).truth(case, device)

    alone = type("Alone", (Exact,), {})  # a case on one rank shows the same precision
    result = proved(alone(inside=little), "dp=2")
    assert result.verdict == "pass", told(result)
    assert "bfloat16" in unchecked(result)
    assert proved(alone(inside=little, grad=lambda g: g * 1.001), "dp=2", explain=False).verdict == "fail"


@pytest.mark.parametrize("dtype", ["float64", *deep("four CPU seconds each", "float32"), "bfloat16"])
def test_an_update_is_judged_by_what_it_moves(dtype: str) -> None:
    """Updates move parameters by a thousandth; an eighth of one is missing, and in another Adam's step count is off."""
    text = f"dp=2 dtype={dtype} steps=2 rows=40 width=20"
    adam = partial(torch.optim.AdamW, lr=5e-4)
    assert proved(Rows(master=True, optimizer=adam), text).verdict == "pass"

    def late(optimizer: Any, step: int) -> None:
        (state,) = optimizer.state.values()
        state["step"] += 1 - step

    assert contradicted(proved(Rows(master=True, optimizer=adam, after=late), text, explain=False)) == {"update"}
    lower = partial(torch.optim.SGD, lr=1e-3)

    def slower(optimizer: Any, step: int) -> None:
        optimizer.param_groups[0]["lr"] = 8.75e-4

    slow = proved(Rows(master=True, optimizer=lower, after=slower), text, explain=False)
    assert contradicted(slow) == {"update"}


@pytest.mark.filterwarnings("error:Casting complex")
def test_an_update_of_complex_numbers_has_two_parts() -> None:
    """The imaginary part of an update is a tenth too small, and the update below 1e-9 of the parameters."""

    class Complex(Rows):
        def trained(self, case: Any, dtype: torch.dtype, data: Any, *, ranks: bool = False) -> Mapping[str, Tensor]:
            w = torch.nn.Parameter(torch.complex(drawn(case.seed, 5, 3), drawn(case.seed + 1, 5, 3)))
            x = torch.stack([torch.complex(drawn(60 + n, 3), drawn(80 + n, 3)) for n in data])
            loss = (x @ w.T).abs().square().sum()
            loss.backward()
            assert w.grad is not None
            if ranks:
                dist.all_reduce(w.grad)
            moved = -1e-11 * w.grad
            return {"param_after/0/w": (w + (self.grad(moved) if ranks else moved)).detach()}

    assert proved(Complex(), "dp=2 steps=1").verdict == "pass"
    smaller = proved(Complex(grad=lambda g: torch.complex(g.real, 0.9 * g.imag)), "dp=2 steps=1", explain=False)
    assert contradicted(smaller) == {"update"}


def test_values_of_parameters_that_never_move_are_judged_by_themselves() -> None:
    """Rounding of the initial value would hide a movement of 0; it does not hide a wrong value."""

    class Begun(Rows):
        def trained(self, case: Any, dtype: torch.dtype, data: Any, *, ranks: bool = False) -> Mapping[str, Tensor]:
            w = torch.nn.Parameter(drawn(case.seed, 9, 5).to(dtype))
            begun = self.grad(w.detach()) if ranks else w.detach().clone()
            (torch.stack([drawn(n, 5) for n in data]).to(dtype) @ w.T).square().sum().backward()
            assert w.grad is not None
            if ranks:
                dist.all_reduce(w.grad)
            torch.optim.SGD([w], lr=0.01).step()
            return {"begun/w": begun, "param/w": w.detach()}

    right, wrong = (Begun(wide=True, grad=lambda g, by=by: g * by) for by in (1.0, 1.05))
    text = "dp=2 steps=1 dtype=bfloat16"
    assert verdict_of(proved(right, text), "forward").decided == {"begun": (1, 1)}
    assert contradicted(proved(wrong, text, explain=False)) == {"forward"}


def test_an_update_that_its_storage_hides_is_undecided() -> None:
    small = partial(torch.optim.SGD, lr=1e-4)
    result = proved(Rows(optimizer=small), "dp=2 dtype=bfloat16", explain=False)
    assert verdict_of(result, "update").verdict == "unknown"
    assert proved(Rows(optimizer=small, master=True), "dp=2 dtype=bfloat16", explain=False).verdict == "pass"


def test_whole_numbers_that_follow_from_rounding_are_bounded_and_no_others() -> None:
    texts = [f"dp=2 dtype=bfloat16 seed={seed} rows=60 steps=1" for seed in range(4)]
    results = [proved(Rows(master=True), text) for text in texts]
    assert {result.verdict for result in results} == {"pass"}
    assert any("picked/0" in unchecked(result) for result in results), "in none of them rounding changed a count"

    class Miscounted(Rows):
        def __call__(self, case: Any, device: torch.device) -> Mapping[str, Tensor]:
            out = dict(super().__call__(case, device))
            return out | {"picked/0": out["picked/0"].roll(1)}

    assert "forward" in contradicted(proved(Miscounted(master=True), texts[0], explain=False))
    assert "forward" in contradicted(proved(Miscounted(), "dp=2 rows=60 steps=1", explain=False))


class OutOfSight(Rows):
    """A subject whose truth computes in numpy, without the ranks' rounding of a gradient that nearly cancels."""

    def truth(self, case: Any, device: torch.device) -> Mapping[str, Tensor]:
        weights = drawn(case.seed, case.width, case.width, std=0.5).to(getattr(torch, case.dtype)).double().numpy()
        out: dict[str, Tensor] = {}
        for step in range(case.steps):
            loss, grad, picked = 0.0, 0.0 * weights, torch.zeros(case.width, dtype=torch.int64)
            for rank, micro in itertools.product(range(case.dp), range(case.micro)):
                rows = torch.stack([drawn(n + 5000, case.width) for n in case.samples(step, micro, rank, case.rows)])
                x = rows.to(getattr(torch, case.dtype)).double().numpy()
                y = x @ weights.T
                gap, share = y - torch.from_numpy(x).roll(1, -1).numpy(), case.rows * case.width * case.dp * case.micro
                loss, grad = loss + float((gap**2).sum()) / share, grad + 2 * gap.T @ x / share
                picked += torch.bincount(torch.from_numpy(y.argmax(-1)), minlength=case.width)
            out |= {f"loss/{step}": torch.tensor(loss, dtype=torch.float64), f"picked/{step}": picked}
            out |= {} if step else {"grad/w": torch.from_numpy(grad.copy())}
            weights = weights - 0.1 * grad
            out[f"param_after/{step}/w"] = torch.from_numpy(weights.copy())
        return out


@pytest.mark.parametrize("dtype", ["float64", *deep("four CPU seconds each", "float32"), "bfloat16"])
def test_a_truth_outside_of_torch_has_the_rounding_of_the_ranks(dtype: str) -> None:
    text = f"dp=2 dtype={dtype} rows=30 steps=1"
    result = proved(OutOfSight(master=True), text)
    assert result.verdict == "pass", told(result)
    wrong = OutOfSight(master=True, grad=lambda g: g * (1.2 if dtype == "bfloat16" else 1.0001))
    assert "parameter_gradients" in contradicted(proved(wrong, text, explain=False))
    if dtype != "bfloat16":
        rate = 0.1 * (1 + {"float64": 1e-8, "float32": 5e-5}[dtype])
        steeper = OutOfSight(optimizer=partial(torch.optim.SGD, lr=rate))
        assert contradicted(proved(steeper, text, explain=False)) == {"update"}
