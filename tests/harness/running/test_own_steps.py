"""Updates are judged by the gradients that ranks returned: optimizers that are somewhat wrong fail in every dtype."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.harness.proofs import contradicted, proved, verdict_of

Make = Callable[[list[Tensor], float], Any]


class Signed(torch.optim.Optimizer):
    """Steps by the sign of the gradient's mean, as Lion does; with a decay of the weights."""

    def __init__(self, parameters: list[Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                p.mul_(1 - 0.1 * group["lr"]).add_(mean.sign(), alpha=-group["lr"])


class ByHand:
    """SGD that is no optimizer of torch, so nothing is known of what it takes."""

    def __init__(self, parameters: list[Tensor], lr: float) -> None:
        self.parameters, self.lr = parameters, lr

    @torch.no_grad()
    def step(self) -> None:
        for p in self.parameters:
            assert p.grad is not None
            p.sub_(self.lr * p.grad)


class Trained:
    """A layer on dp ranks, in the case's dtype, whose optimizer has `wrong` times its learning rate on several ranks.

    With `masters` the optimizer steps float32 copies, which are returned; with `wide` ranks add gradients in float32.
    With `share` averages go a hundredth of the way to what is stepped, on several ranks `share` times it.
    """

    truth, words = "alone", {"micro": 1, "steps": 1}

    def __init__(
        self,
        make: Make,
        wrong: float = 1.0,
        *,
        masters: bool = False,
        clip: float = 0.0,
        wide: bool = False,
        share: float = 0.0,
    ) -> None:
        self.share = share
        self.make, self.wrong, self.masters, self.clip, self.wide = make, wrong, masters, clip, wide

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Tensor]:
        torch.manual_seed(case.seed)
        dtype = getattr(torch, case.dtype)
        layer, total = nn.Linear(7, 5).to(dtype), torch.zeros((), dtype=dtype)
        for micro in range(case.micro):
            numbers = case.samples(0, micro, dist.get_rank(), 3)
            rows = torch.stack([torch.randn(7, generator=torch.Generator().manual_seed(number)) for number in numbers])
            loss = layer(rows.to(dtype)).square().sum() / (3 * case.micro * case.dp)
            loss.backward()
            total += loss.detach()
        held = [p.detach().to(torch.promote_types(dtype, torch.float32)) for p in layer.parameters()]
        trained: list[Tensor] = held if self.masters else [*layer.parameters()]
        dist.all_reduce(total)
        gradients: dict[str, Tensor] = {}
        for (name, p), weight in zip(layer.named_parameters(), trained, strict=True):
            assert p.grad is not None
            gradient = p.grad.to(weight.dtype) if self.wide else p.grad
            dist.all_reduce(gradient)
            weight.grad = gradient.to(weight.dtype)
            gradients[f"grad/{name}"] = weight.grad.clone()
        self.scale(trained)
        averages = [w.detach().clone() for w in trained]
        self.make(trained, 0.5 * (self.wrong if case.dp > 1 else 1.0)).step()
        stepped = {f"param/{name}": w.detach() for (name, _), w in zip(layer.named_parameters(), trained, strict=True)}
        for (name, w), average in zip(list(stepped.items()), averages, strict=True) if self.share else ():
            stepped[name.replace("param", "average")] = average.lerp_(w, 0.01 * (self.share if case.dp > 1 else 1.0))
        return {"loss/0": total, **gradients, **stepped}

    def scale(self, trained: list[Tensor]) -> None:
        if self.clip:
            nn.utils.clip_grad_norm_(trained, self.clip)


WRONG = {
    "signed": (Trained(Signed), Trained(Signed, 1.1), 0.1),
    "masters": (Trained(torch.optim.SGD, masters=True), Trained(torch.optim.SGD, 1.02, masters=True), 0.02),
    "clipped": (
        Trained(torch.optim.SGD, masters=True, clip=0.1),
        Trained(torch.optim.SGD, 0.98, masters=True, clip=0.1),
        0.02,
    ),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_step_that_is_not_that_of_the_ranks_own_gradients_is_wrong(kind: str, dtype: str) -> None:
    right, wrong, by = WRONG[kind]
    assert proved(right, f"dp=3 dtype={dtype}").verdict == "pass"
    found = proved(wrong, f"dp=3 dtype={dtype}", explain=False)
    assert contradicted(found) == {"update"}
    worst = verdict_of(found, "update").worst
    assert worst is None or worst.error == pytest.approx(by, rel=0.6)


@pytest.mark.parametrize("taken", ["largest", "mean"])
def test_a_factor_that_follows_from_another_norm_or_none_is_right(taken: str) -> None:
    """Gradients are rounded in bfloat16 and held in float32, so a wrong norm of them would be a wrong step."""

    class Scaled(Trained):
        def scale(self, trained: list[Tensor]) -> None:
            if taken == "largest":
                nn.utils.clip_grad_norm_(trained, 0.1, norm_type=float("inf"))
            else:
                for w in trained:
                    assert w.grad is not None
                    w.grad /= 3

    assert proved(Scaled(torch.optim.SGD, masters=True, wide=True), "dp=3 dtype=bfloat16").verdict == "pass"


def test_nothing_is_said_of_steps_that_no_optimizer_of_torch_makes() -> None:
    assert proved(Trained(ByHand, 1.001, masters=True), "dp=3 dtype=bfloat16").verdict == "pass"
    assert proved(Trained(ByHand, 1.001, masters=True), "dp=3").verdict == "fail"


@pytest.mark.parametrize(("share", "failed"), [(1.0, set()), (1.5, {"forward"}), (0.5, {"forward"})])
def test_an_average_of_parameters_is_judged_by_what_moved_it(share: float, failed: set[str]) -> None:
    """Half of a hundredth of a step is far below the rounding of bfloat16 beside the value, and half of what moved."""
    found = proved(Trained(torch.optim.SGD, masters=True, share=share), "dp=3 dtype=bfloat16", explain=False)
    assert contradicted(found) == failed
