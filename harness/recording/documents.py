"""Statement of a subject with packed rows: the document of every token.

    x = documents(embedding(tokens), numbers)    # [rows, tokens, ..], and a whole number of every token
    logits = head(documents(x, numbers))         # at two places at least, the first where tokens enter

`documents` returns its tensor. In runs of the check of that name, it changes the tokens of some documents there, or
stops all gradients but those of some documents, and keeps the values and gradients that came to that place.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor


class _Stated(Protocol):
    """What a run does where a subject states documents."""

    def state(self, tokens: Tensor, numbers: Tensor, place: str) -> Tensor:
        """The tensor to go on with. `place` is the file and the line that states it."""


_STATED: ContextVar[_Stated | None] = ContextVar("shardproof_documents", default=None)


def documents(tokens: Tensor, numbers: Tensor) -> Tensor:
    """State the document of each token, and return `tokens`, a rank's own tensor. Numbers below 0 mean padding.

    A number stands for one document in the whole step: two documents of one number are taken for one. Raises ValueError
    for numbers of a floating-point dtype, and for numbers whose shape is not that of the first dims of `tokens`.
    """
    if numbers.is_floating_point() or tokens.shape[: numbers.dim()] != numbers.shape:
        shapes = f"{tuple(numbers.shape)} {numbers.dtype} for tokens {tuple(tokens.shape)}"
        rule = "needs a whole number for each token"
        raise ValueError(f"documents: {shapes} {rule}; legal: numbers [rows, tokens] for tokens [rows, tokens, width]")
    stated = _STATED.get()
    if stated is None:
        return tokens
    frame = sys._getframe(1)  # noqa: SLF001  (inspect.stack would read the files of all frames)
    return stated.state(tokens, numbers, f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")


@contextmanager
def _set_stated(stated: _Stated) -> Iterator[None]:
    token = _STATED.set(stated)
    try:
        yield
    finally:
        _STATED.reset(token)


class DocumentsNoted:
    """Whether the ranks of a run state documents: `seen`."""

    def __init__(self) -> None:
        self.seen = False

    @contextmanager
    def on_rank(self, rank: int) -> Iterator[None]:
        """To be entered in the thread of a rank, around its program."""
        with _set_stated(self):
            yield

    def state(self, tokens: Tensor, numbers: Tensor, place: str) -> Tensor:  # noqa: ARG002  (as every run has it)
        """The tokens, unchanged."""
        self.seen = True
        return tokens


class DocumentProbe:
    """A run of one rank that changes the tokens of the documents `changed`, and stops all gradients but those of the
    documents `let_through`.

    `found` has the numbers, values and gradients of every statement, named by its place in the order of calls: "0003
    numbers model.py:20".
    """

    def __init__(self, changed: frozenset[int], let_through: frozenset[int]) -> None:
        self.changed, self.let_through = changed, let_through
        self.found: dict[str, Tensor] = {}
        self._calls = 0

    @contextmanager
    def enter_thread(self) -> Iterator["DocumentProbe"]:
        """Inside, the statements of this thread are this probe's."""
        with _set_stated(self):
            yield self

    def state(self, tokens: Tensor, numbers: Tensor, place: str) -> Tensor:
        """The tokens, some of them changed; their gradient will be seen, and stopped for some."""
        call, self._calls = f"{self._calls:04}", self._calls + 1
        self.found[f"{call} numbers {place}"] = numbers.detach().clone()
        self.found[f"{call} values {place}"] = tokens.detach().clone()
        if (
            torch.is_grad_enabled() and not tokens.requires_grad
        ):  # what comes before is frozen: the gradient that would reach it is recorded all the same
            tokens = tokens.detach().requires_grad_()
        kept, moved = (_rows_of(tokens, numbers, chosen) for chosen in (self.let_through, self.changed))
        seen: Tensor = _Stopped.apply(tokens, kept, self.found, f"{call} gradients {place}")
        features = torch.arange(1, 1 + (seen.shape[-1] if seen.dim() > numbers.dim() else 1), device=seen.device)
        return torch.where(moved, seen + features.cos().to(seen).view(-1 if seen.dim() > numbers.dim() else ()), seen)


def _rows_of(tokens: Tensor, numbers: Tensor, chosen: frozenset[int]) -> Tensor:
    """A mask of the tokens of these documents, with as many dims as `tokens`."""
    at = torch.isin(numbers, torch.tensor(sorted(chosen), dtype=numbers.dtype, device=numbers.device))
    return at.view(*at.shape, *(1 for _ in range(tokens.dim() - at.dim())))


class _Stopped(torch.autograd.Function):
    """Forward returns the tensor. Backward keeps its gradient in `found`, and sends on 0 where `kept` is False."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, kept: Tensor, found: dict[str, Tensor], name: str) -> Tensor:
        ctx.place = kept, found, name
        return tokens.view_as(tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        kept, found, name = ctx.place
        (gradient,) = gradients
        found[name] = found[name] + gradient if name in found else gradient.clone()
        return gradient * kept, None, None, None
