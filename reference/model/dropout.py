"""Dropout in the dense model: the field's masks, or those that an implementation drew.

A site is "embedding", "layers.{i}.attention", "layers.{i}.mlp" (hidden states [S, H] of a sample) or
"layers.{i}.attention.shares" (its softmax [N, S, S]). Behind the decoder "prediction.{k}" has the same sites, its layer
being "prediction.{k}.layer". Sample number of a step: number of the micro-batch times its rows, plus the row; a packed
row is one sample. Source: arXiv:1207.0580; the sites are those of Megatron-LM's GPT.
"""

import functools
import math

from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.checkpoints.stored import steps_before
from shardproof.reference.data.batches import Batch
from shardproof.reference.errors import CaseError
from shardproof.reference.model.given import given_now

SHARES = "shares"
_SMALL = 2**17
"""Elements of masks that are kept: the truth and each of its control runs drop by the same ones."""


def sites(case: Case) -> dict[str, tuple[int, ...]]:
    """Every site of the case that drops something, with the shape of one sample, in the order of the forward pass."""
    length = case.row_tokens
    hidden, shares = (length, case.hidden), (case.heads, length, length)
    found: dict[str, tuple[int, ...]] = {"embedding": hidden}
    for number, block in enumerate(case.blocks):
        if case.embeds_behind and number >= case.layers:
            found[f"{block.rpartition('.')[0]}.embedding"] = hidden
        found |= {f"{block}.attention.{SHARES}": shares, f"{block}.attention": hidden, f"{block}.mlp": hidden}
    return {site: shape for site, shape in found.items() if rate_of(case, site)}


def rate_of(case: Case, site: str) -> float:
    """The share that is dropped there."""
    rate: float = case.attention_dropout if site.endswith(f".{SHARES}") else case.dropout
    return rate


def mask(case: Case, batch: Batch, site: str) -> Tensor | None:
    """Bool [B, *shape of a sample], True where the site keeps; None where it drops nothing.

    Raises CaseError for one that was drawn elsewhere and is not there.
    """
    rate = rate_of(case, site)
    if not rate:
        return None
    rows = batch.tokens.shape[0]
    samples = range(batch.number * rows, (batch.number + 1) * rows)
    if case.random == "field":
        return _of_field(case, site, batch.step, samples).to(batch.tokens.device)
    name = f"mask/{batch.step}/{site}"
    if name not in given_now():
        rule = f"draws masks that the dense model must be given, and {name} was not returned"
        raise CaseError("random", case.random, rule, "random=field, or return what dropout kept under that name")
    return given_now()[name][samples.start : samples.stop].to(batch.tokens.device)


def masks(case: Case) -> dict[str, Tensor]:
    """`mask/<step>/<site>`: bool [samples of a step, *shape of a sample], of the field."""
    samples = range(case.dp * case.micro * case.rows)
    return {
        f"mask/{step}/{site}": _of_field(case, site, step, samples)
        for step in range(case.steps)
        for site in sites(case)
    }


def _of_field(case: Case, site: str, step: int, samples: range) -> Tensor:
    shape = sites(case)[site]
    draw = _drawn if len(samples) * math.prod(shape) <= _SMALL else _drawn.__wrapped__
    return draw(f"{case.seed} dropout {site}", rate_of(case, site), steps_before(case) + step, samples, shape)


@functools.lru_cache(maxsize=256)
def _drawn(text: str, rate: float, step: int, samples: range, shape: tuple[int, ...]) -> Tensor:
    from shardproof.reference.model.field import words  # noqa: PLC0415

    return words(text, samples=samples, step=step, shape=shape)[0] >= math.ceil(rate * 2**32)
