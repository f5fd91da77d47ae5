"""Rules of a dense model that were tried, written by hand."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from harness.dense_model import Tried


@dataclass(frozen=True)
class Rule:
    """A rule without words of its own."""

    id: str
    words: str = "under another rule"
    explains: frozenset[str] = frozenset()
    names_readings: bool = False

    def readings(self, case: Any, device: Any, **words: Any) -> Mapping[str, Mapping[str, Tensor]]:
        """Nothing: what it computes is given beside it."""
        del case, device, words
        return {}


def tried(predictions: Mapping[str, Tensor]) -> tuple[Tried, ...]:
    """Tried rules, from "<id>.<reading>/<name>" -> tensor."""
    found: dict[str, dict[str, dict[str, Tensor]]] = {}
    for key, tensor in predictions.items():
        head, _, name = key.partition("/")
        id, _, reading = head.partition(".")
        found.setdefault(id, {}).setdefault(reading, {})[name] = tensor
    return tuple(Tried(Rule(id), readings) for id, readings in found.items())
