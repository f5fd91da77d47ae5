"""The domain of every word of a case: the values that stand for all that it can have, the plainest first.

Experiments on a failing case choose from these (harness.running.experiments).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from reference.case.case import Case
from reference.case.rules import legal_words

__all__ = ["NUMBERS", "domains"]

NUMBERS: Mapping[str, tuple[Any, ...]] = {
    "tp": (1, 2, 4),
    "dp": (1, 2, 4),
    "pp": (1, 2),
    "cp": (1, 2, 4),
    "cp_inner": (1, 2),
    "wp": (1, 2, 4),
    "order": ("tp-cp-ep-dp-pp", "dp-cp-tp-pp"),
    "chunks": (1, 2),
    "group": (0, 3),
    "first_layers": (0, 1),
    "last_layers": (0, 1),
    "layers": (1, 2),
    "kv_heads": (8, 12, 2),
    "vocab": (512, 509),
    "batch": (1, 2),
    "micro": (1, 2, 3),
    "recompute_layers": (1, 2),
    "zero": (0, 1, 2, 3),
    "bucket": (0, 900),
    "shard": (0, 2),
    "parity": (0, 1),
    "steps": (1, 2, 3),
    "lr": (1.0, 0.1),
    "clip": (0.0, 0.1),
    "loss_scale": (1.0, 8.0),
    "dropout": (0.0, 0.1),
    "attention_dropout": (0.0, 0.1),
    "label_smoothing": (0.0, 0.1),
}
"""Words whose values are no short list, each with the values that stand for all."""
_FIXED = frozenset({"preset", "variant"})
"""Words that no experiment changes: the name of a model, and a deviation that is wrong on purpose."""


def domains() -> dict[str, tuple[Any, ...]]:
    """Every word that has several values, or names a file, with its values, the plainest first."""
    words, found = legal_words(), dict[str, tuple[Any, ...]]()
    for field in dataclasses.fields(Case):
        word, default = field.name, field.default
        if isinstance(default, bool):
            found[word] = (default, not default)
        elif word in words:
            found[word] = (default, *(value for value in words[word] if value != default))
        elif word in NUMBERS or default == "":
            found[word] = NUMBERS.get(word, (default,))
    return {word: values for word, values in found.items() if word not in _FIXED}
