"""Dropout of programs that know nothing of it: the masks that torch draws, recorded, or replaced by others.

torch draws a mask by `aten.bernoulli_` (nn.Dropout and its kin, F.dropout, scaled_dot_product_attention's own formula)
or within `aten.native_dropout` (GPUs). A dispatch mode sees both, of a DTensor with its place. Masks that a program
makes otherwise, of `torch.rand` or inside a fused kernel of attention, are not seen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardproof.harness.engines.calls.callers import caller
from shardproof.harness.outcome.blocks import Block, blocks
from shardproof.harness.protocols import Value
from shardproof.harness.subject import NamedSubject, called
from shardproof.harness.torch_internals.autograd import current_task
from shardproof.harness.torch_internals.modes import DispatchMode, FakeTensor, take_themselves_apart

aten = torch.ops.aten
_BERNOULLI, _NATIVE = aten.bernoulli_.float, aten.native_dropout.default
_FORWARD, _BACKWARD = "dropout.drawn", "dropout.drawn_anew"


class Draw(NamedTuple):
    """A mask as a rank drew it: bool blocks of what it was drawn for, the rate, the user's line, "file:line".

    `anew`: drawn in backward, and no forward drew it: recomputation that does not repeat its forward.
    """

    line: str
    rate: float
    blocks: tuple[Block, ...]
    anew: bool = False


@dataclass(frozen=True, slots=True)
class WithMasks:
    """A subject whose outcome has the masks that it draws too (see `taken_out`).

    With `joint`, these take the place of its own, in the order of the draws; `given` is passed on where there is any.
    """

    subject: NamedSubject
    joint: tuple[Tensor, ...] | None = None
    given: Mapping[str, Tensor] | None = None

    def __getattr__(self, attribute: str) -> Any:
        """Any other attribute is the subject's."""
        return getattr(self.subject.call, attribute)  # session, per_rank

    def __call__(self, case: Any, device: torch.device) -> Mapping[str, Value]:
        """The subject's outcome and its masks."""
        call: Any = self.subject.call
        if self.given is not None:
            call = partial(call, given=self.given)
        with DropoutProbe(self.joint) as probe:
            outcome = called(call, case, device)
        return {**outcome, **probe.found}


class DropoutProbe(DispatchMode):
    """Records the masks of its thread in `found`; with `joint`, puts these in place of those that forwards draw.

    Recomputation gets what its forward got: it begins with the same state of the generator.
    """

    def __init__(self, joint: Sequence[Tensor] | None = None) -> None:
        super().__init__()
        self.found: dict[str, tuple[Block, ...]] = {}
        self._joint = joint
        self._masks: dict[bytes, Tensor | None] = {}
        self._forwards = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The operator's result; that of a draw with another mask where there is one."""
        kwargs = kwargs or {}
        draws = operator in (_BERNOULLI, _NATIVE) and not isinstance(args[0], FakeTensor)
        if not draws:
            return NotImplemented if take_themselves_apart(types) else operator(*args, **kwargs)
        state = _state(args[0].device, kwargs.get("generator"))
        result = operator(*args, **kwargs)
        if operator is _BERNOULLI:
            rate, kept = 1 - (args[1] if len(args) > 1 else kwargs.get("p", 0.5)), result
        else:
            rate, kept = args[1], result[1]
        mask = self._noted(state, rate, kept)
        if mask is None:
            return result
        if operator is _BERNOULLI:
            return result.copy_(mask.view_as(result))
        mask = mask.view_as(kept).to(kept.device)
        return args[0] * mask * (1 / (1 - rate)), mask

    def _noted(self, state: bytes, rate: float, kept: Tensor) -> Tensor | None:
        """Note a draw; the mask to put in its place, None for its own."""
        backward = current_task() >= 0
        if not backward:
            number, self._forwards = self._forwards, self._forwards + 1
            self._masks[state] = self._joint[number] if self._joint and number < len(self._joint) else None
        if self._joint is None and not (backward and state in self._masks):
            name = f"{_BACKWARD if backward else _FORWARD}/{len(self.found)}/{rate:.12g}/{caller()}"
            self.found[name] = tuple(replace(block, local=block.local != 0) for block in blocks(kept.detach()))
        return self._masks.get(state)


def taken_out(outcome: dict[str, tuple[Block, ...]]) -> tuple[dict[str, tuple[Block, ...]], tuple[Draw, ...]]:
    """Outcome of the subject itself, and the masks that DropoutProbe found, in the order in which they were drawn."""
    draws = []
    for name, found in outcome.items():
        kind, _, rest = name.partition("/")
        if kind in (_FORWARD, _BACKWARD):
            _, rate, line = rest.split("/", 2)
            draws.append(Draw(line, float(rate), found, anew=kind == _BACKWARD))
    own = {name: found for name, found in outcome.items() if name.partition("/")[0] not in (_FORWARD, _BACKWARD)}
    return own, tuple(draws)


def _state(device: torch.device, generator: torch.Generator | None) -> bytes:
    """The state from which a draw on this device begins."""
    if generator is None and device.type == "cuda":
        return torch.cuda.get_rng_state(device).numpy().tobytes()
    return (torch.get_rng_state() if generator is None else generator.get_state()).numpy().tobytes()
