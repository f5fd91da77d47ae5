"""Which experts tokens go to where no router chooses (`routing=`): a function of seed, layer and the token's number.

    equal    the next top_k experts, round and round; with skew=1/4 the first top_k experts for a quarter of the tokens
    skewed   expert x is drawn with a weight of 1 / (1 + x)
    empty    only the first half of the experts is drawn, or the first top_k
    one      the same top_k experts for all tokens

Tokens are numbered through all steps of a training. Tokens of a row are numbered by their places, rows of a micro-batch
one after the other, micro-batches as in `reference.data.batches`. No model is needed here: the rows that a rank sends
can be counted without one.
"""

import math

import torch
from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.checkpoints.foreign import steps_before
from shardproof.reference.language.rules import SKEW_PARTS

EQUAL_DIGITS = 9
"""Where experts drop rows, weights that agree to this many decimals count as equal.

Tokens with the same past (repeated text, beginnings of rows) have equal weights, and rounding must not order them.
"""
_ODD = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)
"""Odd multipliers of a hash of 64 bits (Steele, Lea and Flood 2014, doi:10.1145/2660193.2660195)."""


def first_token(case: Case, step: int, micro: int, dp_rank: int) -> int:
    """The number of the first token of a micro-batch."""
    return (((steps_before(case) + step) * case.micro + micro) * case.dp + dp_rank) * case.tokens


def forced_experts(case: Case, layer: int, tokens: Tensor) -> Tensor:
    """The experts of these tokens, given by their numbers int64 [...]: bool [..., experts], on the CPU.

    Raises ValueError where the router chooses.
    """
    count, every, chosen = case.top_k, torch.arange(case.experts), torch.zeros(0)
    first = int(_hash(torch.tensor(case.seed % 2**62 + layer)) % case.experts)
    match case.routing:
        case "equal":
            places = (tokens * count + first) % case.experts
            if case.skew:  # in blocks of `experts` tokens, so that the remaining blocks are equal
                part = tokens // case.experts % SKEW_PARTS
                places = torch.where(part < round(case.skew * SKEW_PARTS), 0, places)
            chosen = ((every - every[:, None]) % case.experts < count)[places]
        case "one":
            chosen = ((every - first) % case.experts < count).expand(*tokens.shape, -1)
        case "skewed" | "empty":
            keys = _hash(tokens[..., None] * case.experts + every + _hash(torch.tensor(case.seed % 2**62 + layer)))
            shares = ((keys & (2**52 - 1)).double() + 0.5) / 2**52
            if case.routing == "empty":
                shares[..., max(count, case.experts // 2) :] = 0
            else:
                shares = shares ** (1.0 + every)
            best = shares.sort(dim=-1, descending=True, stable=True).indices[..., :count]
            chosen = torch.zeros(shares.shape, dtype=torch.bool).scatter_(-1, best, True)
        case _:
            raise ValueError(f"routing={case.routing}: leaves the choice to the router; legal: equal skewed empty one")
    return chosen


def period(case: Case) -> int:
    """The number of tokens after which the choices repeat; 0: never, or not known."""
    if case.capacity and case.capacity_of != "rank" and case.drop == "score":
        return 0
    if case.routing == "equal":
        return int(case.experts * SKEW_PARTS if case.skew else case.experts // math.gcd(case.experts, case.top_k))
    return int(case.routing == "one")


def _hash(x: Tensor) -> Tensor:
    """A 64-bit hash of each integer."""
    for odd in _ODD:
        x = x * odd
        x = x ^ (x >> 29)
    return x
