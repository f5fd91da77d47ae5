"""Outcomes that a subject may return and that are refused: only plain tensors of numbers under names of text pass."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.outcome.blocks import blocks, localize
from harness.outcome.merging import same_bits
from harness.shard import Shard

FULL = torch.arange(24, dtype=torch.float64).reshape(6, 4)


class Alien(Tensor):
    """A tensor by its own rules, as wrappers of packed numbers are."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Nothing is possible but what is done with it here."""
        return args[0] if func is torch.ops.aten.detach.default else NotImplemented


QUANTIZED = partial(torch.quantize_per_tensor, FULL.float(), 0.1, 0, torch.qint8)
NESTED = partial(torch.nested.nested_tensor, [FULL[0], FULL[1, :2]], layout=torch.jagged)
ALIEN = partial(Alien._make_subclass, Alien, FULL)
UNREADABLE = partial(torch.zeros(2, dtype=torch.uint8).view, torch.float4_e2m1fn_x2)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch on its own quantized and nested tensors
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (FULL.to_sparse, "the layout is sparse_coo, and blocks are dense; legal: its to_dense()"),
        (QUANTIZED, "a quantized tensor has no numbers to compare; legal: its dequantize()"),
        (
            lambda: FULL.to("meta"),
            "the tensor lies on the meta device and has no numbers; legal: a tensor on the device that was given",
        ),
        (NESTED, "a nested tensor has no one shape; legal: one name for each of its parts"),
        (ALIEN, "Alien is a tensor only by its own rules; legal: the plain tensor inside of it"),
        (UNREADABLE, "numbers of float4_e2m1fn_x2 cannot be read; legal: a tensor of another dtype"),
        (lambda: SimpleNamespace(local="4", offsets=(), global_shape=()), "str is not a tensor; legal: a torch.Tensor"),
    ],
)
def test_what_is_no_plain_tensor_of_numbers_is_refused_by_name(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError) as refused:
        localize({"loss/0": 1.0, "grad/w": make()})
    assert str(refused.value) == f"outcome 'grad/w': {words}"


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        ({"w": [Shard(FULL.to_sparse(), (0, 0), (6, 4))]}, "outcome 'w': the layout is sparse_coo"),
        ({"loss/0": 1.0, 0: FULL}, "outcome 0: a name must be text, not int; legal: 'loss/0'"),
        ({"grad/\ud800": FULL}, r"outcome 'grad/\ud800': a name must be text that a file can hold; legal: 'loss/0'"),
        ({"grad/w": ["no"]}, "outcome 'grad/w': str is not a value"),
        (None, "a subject returned NoneType; it must return a mapping of names to tensors"),
    ],
)
def test_shards_and_names_that_are_none_are_refused_too(outcome: Any, words: str) -> None:
    with pytest.raises(ValueError) as refused:
        localize(outcome)
    assert str(refused.value).startswith(words)


def test_views_that_are_resolved_late_have_bits() -> None:
    number = torch.tensor([1 + 2j])
    (block,) = blocks(number.conj())
    assert same_bits(block.local, torch.tensor([1 - 2j]))
