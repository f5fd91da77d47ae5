"""The bounds of scaled gradients: no part of a sum exceeds what `bound` counts, and some part reaches `least`."""

import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.errors import CaseError
from shardproof.reference.model import layers
from shardproof.reference.model.decoder import PLAIN
from shardproof.reference.model.parameters import weights
from shardproof.reference.training import scaling
from shardproof.reference.training.control import refuse_decisive
from shardproof.reference.training.reach import Reach, with_terms
from shardproof.reference.training.scaling import LossScale
from shardproof.reference.training.truth import truth

SIZES = "layers=1 heads=4 kv_heads=2 hidden=16 ffn=20 vocab=48 seq=8 batch=2 micro=2 dtype=float16 master=float32"
CPU = torch.device("cpu")


class Sums(NamedTuple):
    """All that a loss scale reads of a step."""

    reach: Reach


@dataclasses.dataclass(slots=True)
class Met(Reach):
    """Keeps the terms of every parameter, and the largest size of all others."""

    terms: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    inside: float = 0.0

    def meet_terms(self, parameter: Tensor, sizes: Tensor) -> None:
        self.terms[id(parameter)] = sizes

    def meet_inside(self, gradient: Tensor) -> None:
        self.inside = max(self.inside, float(gradient.abs().max()))


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def test_no_part_of_a_gradient_exceeds_its_terms() -> None:
    """A part is what some rows, features or heads of the output's gradient give."""
    torch.manual_seed(0)
    table, weight, bias, scale, shift = drawn(7, 6), drawn(5, 6), drawn(5), drawn(6), drawn(6)
    q, k, v, visible = drawn(2, 4, 6, 3), drawn(2, 4, 2, 3), drawn(2, 4, 2, 3), layers.visible(4, None, CPU)
    x, rows, w, index = drawn(2, 4, 6), drawn(8, 6), drawn(8), torch.randint(7, (2, 4))
    met = Met(case=Case())
    watched = with_terms(PLAIN, met)
    results = {
        "look_up": (watched.look_up(table, index), [table], []),
        "linear": (watched.linear(x, weight, bias), [weight, bias], [x]),
        "norm": (watched.norm(x, scale, shift), [scale, shift], []),
        "attention": (watched.attention(q, k, v, visible), [], [q, k, v]),
        "weigh": (watched.weigh(rows, w), [], [w]),
    }
    for name, (y, parameters, inputs) in results.items():
        gradient, met.inside = torch.randn_like(y), 0.0
        torch.autograd.grad(y, [*parameters, *inputs], gradient, retain_graph=True)
        terms, inside = dict(met.terms), met.inside
        for _ in range(20):
            kept = torch.rand(y.shape[:-1]) < 0.5 if parameters else torch.rand(y.shape) < 0.5
            some = kept[..., None] if parameters else kept
            found = torch.autograd.grad(y, [*parameters, *inputs], gradient * some, retain_graph=True)
            for parameter, part in zip(parameters, found, strict=False):
                assert (part.abs() <= terms[id(parameter)] + 1e-12).all(), name
            assert all(part.abs().max() <= inside + 1e-12 for part in found[len(parameters) :]), name


@pytest.mark.parametrize(
    "words",
    [
        "mode=tp tp=2",
        "mode=tp tp=2 grad_dtype=float32",
        "mode=tp-sp tp=2 grad_dtype=float32",
        "mode=tp tp=1 cp=2 grad_dtype=float32 dropout=0.1",
        "mode=isp tp=2 wp=2 tied=true",
        "mode=tp tp=2 wgrad=fused grad_dtype=float32",
        "mode=tp-sp tp=2 activation=relu bias=true",
    ],
)
def test_all_scales_but_a_few_are_decided_and_the_one_proposed_is(words: str) -> None:
    refused, before = 0, 0
    for power in range(18):
        case = Case.parse(f"{SIZES} {words} steps=1 scaler=static loss_scale={2**power}")
        try:
            skipped = int(truth(case, CPU)["skipped/0"])
        except CaseError as error:
            legal = case.but(loss_scale=float(str(error).rpartition("loss_scale=")[2]))
            assert not truth(legal, CPU)["skipped/0"], error
            refused += 1
        else:
            assert skipped >= before, "a larger scale is skipped where a smaller one is"
            before = skipped
    assert before and refused <= 4, refused


def test_a_sum_is_outside_where_its_smallest_largest_part_is() -> None:
    """Two context ranks hold parts of a sum: one holds at least half of it, and none more than all."""
    case = Case.parse(f"{SIZES} mode=tp tp=1 cp=2 grad_dtype=float32 scaler=static")
    parameter = torch.zeros(3, requires_grad=True)

    def backward(scale: float) -> Sums:
        parameter.grad = torch.tensor([0.0, size * scale / case.loss_scale, 0.0])
        reach = Reach(case=case)
        reach.meet_sums({"final_norm.weight": parameter})
        return Sums(reach)

    for size, skipped in ((60_000.0, False), (150_000.0, True)):
        sums, scale, found = LossScale.of(case).run_step(0, backward, exact=True)
        assert (sums.reach.least, sums.reach.bound, scale, found) == (size / 2, size, case.loss_scale, skipped)
    size = 100_000.0
    with pytest.raises(CaseError, match="in step 0 reaches 5e.04 to 1e.05, at the edge of float16"):
        LossScale.of(case).run_step(0, backward, exact=True)


def test_a_scale_has_the_split_decide() -> None:
    """Parts depend on the split, so no other case may stand for one with a scale."""
    case = Case.parse(f"{SIZES} mode=tp tp=2 scaler=static")
    assert case.truth_depends_on_split and not case.but(scaler="none").truth_depends_on_split


def test_a_relu_that_rounding_flips_decides_no_skip() -> None:
    """Where a kink on either side has another step skipped, the case is refused with a smaller scale."""
    case = Case.parse(f"{SIZES} mode=tp tp=2 activation=relu steps=1 scaler=static loss_scale=64")
    found = truth(case, CPU)
    refuse_decisive(case, weights(case, CPU), found, None)
    with pytest.raises(CaseError, match="loss_scale=64.0: rounding decides skipped/0: it flips a relu; legal: .*=16.0"):
        refuse_decisive(case, weights(case, CPU), found | {"skipped/0": torch.tensor(1)}, None)


def test_activation_gradients_have_the_scale_of_their_own_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale grows behind the step of which the activations are returned."""
    case = Case.parse(f"{SIZES} scaler=dynamic loss_scale=8 steps=1")
    usual = truth(case, CPU)
    monkeypatch.setattr(scaling, "GROWTH_INTERVAL", 1)
    grown = truth(case, CPU)
    of_kind = [name for name in usual if name.startswith("act_grad/")]
    assert of_kind and all(torch.equal(usual[name], grown[name]) for name in of_kind)
