"""How large a case is, from its words alone: what the dense model holds at once, and the data that it reads.

Counts are elements of tensors, none of which is made. They are lower bounds, exact for the tensors that they name.
"""

import math
from typing import Any

from shardproof.reference.case import Case, CaseError
from shardproof.reference.features import FEATURES
from shardproof.reference.language.words import declared_words
from shardproof.reference.model.parameters import shapes

_COPIES = 4
"""Copies of every weight in `train`: the given one, the trained one, its gradient, that of step 0."""
_FIELDS = 4
"""Tensors of a batch that have an element a token: tokens, labels, positions, loss mask."""
_SIZES = ("layers", "seq", "batch", "micro", "steps", "dp", "vocab", "ffn", "hidden")


def sizes_by_part(case: Case) -> dict[str, int]:
    """Elements of the dense model by kind of tensor."""
    return {
        "weights and gradients": _COPIES * _weights(case),
        "attention": case.block_count * case.rows * case.heads * case.row_tokens**2,
        "logits": case.tokens * case.vocab,
        "data": _FIELDS * case.steps * case.micro * case.dp * case.tokens,
    }


def first_batch(case: Case) -> dict[str, int]:
    """Elements of one micro-batch: all that a run on shapes reads."""
    return {"a micro-batch": _FIELDS * case.tokens}


def word_of_size(case: Case, limit: int) -> tuple[str, int] | None:
    """The word without which the case would have at most `limit` elements, and its usual value; None if there is no
    such word.
    """
    usual = Case()
    for key in _SIZES:
        try:
            other = case.but(**{key: getattr(usual, key)})
        except CaseError:  # another word needs this one as it is
            continue
        if sum(sizes_by_part(other).values()) <= limit:
            return key, getattr(usual, key)
    return None


def _weights(case: Case) -> int:
    """The number of elements of all weights, if every further layer has as many as the second one."""
    plain: dict[str, Any] = {
        word: field.default for owner in FEATURES.values() for word, field in declared_words(owner).items()
    }
    plain |= {"variant": "", "optimizer": "sgd"}  # no rule of a feature refuses other numbers of layers
    one, two = (sum(map(math.prod, shapes(case.but(layers=layers, **plain)).values())) for layers in (1, 2))
    return one + (case.layers - 1) * (two - one)
