"""The law of conjugate moves on plain torch: gradients that autograd needs must return, and nothing else has to."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.distributed_c10d import _get_default_group
from torch.utils.checkpoint import checkpoint

from shardproof.harness.checking.laws import broken_laws
from shardproof.harness.engines.engine import Engine
from shardproof.harness.ledger import Event
from shardproof.harness.protocols import Subject
from shardproof.harness.running.ranks.execution import execute
from shardproof.reference.case import Case
from tests.harness.recording.toy_calls import Part

CASE = Case.parse("mode=tp tp=2")


def exchanged(x_BD: Tensor, *, copied: bool = True) -> Tensor:
    """The rows of all ranks that are this one's, [B, D] to [B, D]."""
    y_BD = torch.empty_like(x_BD)
    dist.all_to_all_single(y_BD, x_BD.clone() if copied else x_BD)
    return y_BD


class Exchange(torch.autograd.Function):
    """Rows to all ranks when they go `there`, [B, D] to [B, D], and their gradients when they come `back`."""

    @staticmethod
    def forward(ctx: Any, x_BD: Tensor, there: bool, back: bool) -> Tensor:
        """[B, D] to [B, D]."""
        ctx.back = back
        return exchanged(x_BD) if there else x_BD.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return exchanged(gradients[0]) if ctx.back else gradients[0], None, None


class Summed(torch.autograd.Function):
    """The sum over ranks, each its rows; its gradient is the whole one when it is `gathered`."""

    @staticmethod
    def forward(ctx: Any, x_BD: Tensor, gathered: bool) -> Tensor:
        """[2 B, D] to [B, D]."""
        ctx.gathered = gathered
        y_BD = x_BD.new_empty(len(x_BD) // 2, x_BD.shape[1])
        dist.reduce_scatter_tensor(y_BD, x_BD.contiguous())
        return y_BD

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """[B, D] to [2 B, D]."""
        given = gradients[0].contiguous()
        whole = given.new_empty(2 * len(given), given.shape[1])
        if ctx.gathered:
            dist.all_gather_into_tensor(whole, given)
        return whole if ctx.gathered else torch.cat([given, given]), None


class Again(torch.autograd.Function):
    """A library's own checkpoint: gradients are off in its forward, and its backward computes the layer again."""

    @staticmethod
    def forward(ctx: Any, x_BD: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
        """[B, D] to [B, D]."""
        ctx.layer = layer
        ctx.save_for_backward(x_BD)
        return layer(x_BD)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        given = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            made = ctx.layer(given)
        torch.autograd.backward(made, gradients[0])
        return given.grad, None


def moved(function: Any, *given: object) -> Callable[[Tensor], Tensor]:
    """The Function of an input and these arguments."""
    return lambda x_BD: cast(Tensor, function.apply(x_BD, *given))


there_and_back, whole = moved(Exchange, True, True), moved(Summed, True)
there_alone, back_alone, cut = moved(Exchange, True, False), moved(Exchange, False, True), moved(Summed, False)
"""The planted bugs: an exchange without a way back, a way back alone, a sum whose gradient is not gathered."""


def experts(dispatch: Callable[[Tensor], Tensor], combine: Callable[[Tensor], Tensor]) -> nn.Module:
    """An expert on each rank: `dispatch`, a linear, `combine`."""
    return Part(lambda it, x_BD: combine(it.expert(dispatch(x_BD))), expert=nn.Linear(4, 4))


def counted(x_BD: Tensor) -> Tensor:
    """Shares of tokens, which need no gradient, beside the tokens, which do."""
    shares = exchanged(x_BD.detach().softmax(-1))
    with torch.no_grad():
        exchanged(x_BD, copied=False)
    return there_and_back(x_BD) * shares.mean()


def trained(made: Callable[[], Callable[[Tensor], Tensor]]) -> Subject:
    """A subject that makes a layer and takes one step of it on inputs, which need no gradient."""

    def subject(case: Any, device: torch.device) -> dict[str, Tensor]:
        torch.manual_seed(1)
        loss = made()(torch.randn(4, 4)).square().mean()
        loss.backward()
        return {"loss/0": loss.detach()}

    return subject


def plain(combine: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Functional code: parameters and no module, so that the place of its forward is unknown."""

    def layer(x_BD: Tensor) -> Tensor:
        weight = torch.eye(4).requires_grad_()
        return combine(there_and_back(x_BD) @ weight) @ weight

    return layer


def functional_autograd(x_BD: Tensor) -> Tensor:
    """torch's own differentiable exchange."""
    made: Tensor = functional.all_to_all_single_autograd(x_BD, [2, 2], [2, 2], _get_default_group())
    return made


def unseen(x_BD: Tensor) -> Tensor:
    """The planted bug: an exchange without a Function, so that no gradient comes back."""
    return exchanged(x_BD, copied=False) + x_BD


def again(layer: nn.Module, reentrant: bool) -> Callable[[Tensor], Tensor]:
    """A layer that is computed once more in backward, after another one."""
    first = nn.Linear(4, 4)
    return lambda x_BD: checkpoint(layer, first(x_BD), use_reentrant=reentrant)


def again_by(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """Call of the layer by a checkpoint that torch does not know."""
    first, second = nn.Linear(4, 4), moved(Again, layer)
    return lambda x_BD: second(first(x_BD))


def evaluated(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    """A layer behind another, called twice: no backward follows the first time, though gradients are on."""
    both = nn.Sequential(nn.Linear(4, 4), layer)

    def twice(x_BD: Tensor) -> Tensor:
        both(x_BD)
        made: Tensor = both(x_BD)
        return made

    return twice


right = partial(experts, there_and_back, there_and_back)
lost = partial(experts, there_alone, there_and_back)
MORE, FEWER = (
    "{} all-to-alls of {} B over tp go forward and {} of {} B backward".format(*numbers)
    for numbers in ((6, 384, 4, 256), (4, 256, 2, 128))
)
RIGHT: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "several layers, the first fed by inputs": lambda: nn.Sequential(right(), experts(counted, there_and_back)),
    "functional code outside of modules": lambda: plain(there_and_back),
    "torch's own exchange outside of modules": lambda: plain(functional_autograd),
    "computed again": lambda: again(right(), reentrant=False),
    "computed again by a backward of its own": lambda: again(right(), reentrant=True),
    "computed again by a library": lambda: again_by(right()),
    "a sum that a library computes again": lambda: again_by(experts(there_and_back, whole)),
    "a forward that no backward follows": lambda: evaluated(right()),
    "a sum of inputs": lambda: experts(cut, whole),
}
WRONG: dict[str, tuple[Callable[[], Callable[[Tensor], Tensor]], str]] = {
    "an exchange": (lambda: nn.Sequential(experts(there_and_back, there_alone), right()), MORE),
    "an exchange that autograd does not see": (lambda: nn.Sequential(experts(there_and_back, unseen), right()), MORE),
    "an exchange that is computed again": (lambda: again(lost(), reentrant=False), FEWER),
    "an exchange that a library computes again": (lambda: again_by(lost()), FEWER),
    "the only exchange, computed again": (
        lambda: again_by(experts(there_alone, lambda x: x)),
        "2 all-to-alls of 128 B over tp go forward and 0 of 0 B backward",
    ),
    "a cut sum that a library computes again": (
        lambda: again_by(experts(there_and_back, cut)),
        "2 reduce_scatters of 64 B float32 over tp in forward of no module",
    ),
    "an exchange, beside a forward that no backward follows": (lambda: evaluated(lost()), FEWER),
    "an exchange too many": (
        lambda: plain(lambda x_BD: there_and_back(x_BD) + back_alone(back_alone(x_BD))),
        "4 all-to-alls of 256 B over tp go forward and 6 of 384 B backward",
    ),
    "a cut sum": (
        lambda: nn.Sequential(experts(there_and_back, cut), right()),
        "2 reduce_scatters of 64 B float32 over tp in forward of 0",
    ),
}


def ledger_of(engine: Engine, subject: Subject) -> tuple[Event, ...]:
    return execute(CASE, subject, engine, text=str(CASE)).events


@pytest.mark.parametrize("made", RIGHT.values(), ids=RIGHT)
def test_what_needs_no_gradient_has_no_conjugate(made: Any, engine: Engine) -> None:
    events = ledger_of(engine, trained(made))
    assert {"all_to_all", "reduce_scatter"} & {event.op for event in events if event.phase != "backward"}
    assert [broken.fact.text for broken in broken_laws(events)] == []


@pytest.mark.parametrize(("made", "words"), WRONG.values(), ids=WRONG)
def test_a_missing_conjugate_is_told(made: Any, words: str, engine: Engine) -> None:
    (broken,) = broken_laws(ledger_of(engine, trained(made)))
    assert words in broken.fact.text


def planted(case: Any, device: torch.device) -> Any:
    """A subject of two expert layers, the first of which lacks a conjugate."""

    def layers() -> nn.Module:
        return nn.Sequential(experts(there_and_back, there_alone), experts(functional_autograd, there_and_back))

    return trained(layers)(case, device)


def test_ranks_as_processes_tell_the_same(pool: Engine, engine: Engine) -> None:
    ledgers = [ledger_of(one, planted) for one in (pool, engine)]
    asked = [[(event.phase, event.needs_gradient) for event in ledger] for ledger in ledgers]
    assert asked[0] == asked[1]
    (one,), (other,) = map(broken_laws, ledgers)
    assert one.fact.text == other.fact.text
