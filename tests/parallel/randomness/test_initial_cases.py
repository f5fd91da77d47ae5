"""Initial values: those of Megatron by formula, whole or drawn shard by shard, and what goes wrong with them."""

from __future__ import annotations

import math

import pytest
import torch

from harness.checking.data_checks import initial_values
from harness.checking.evidence import FAIL, PASS
from harness.shard import Shard
from parallel.communication.layout import Cut, Placement
from parallel.randomness.initial import initial, streams_of
from parallel.randomness.streams import Streams, seeds
from reference.case import Case
from reference.model.parameters import drawn, shapes
from tests.harness.toy_evidence import evidence
from tests.parallel.case_tables import INITIAL

WHOLE = Placement(shape=(7, 5))
SIZES = INITIAL.sizes


@pytest.mark.parametrize(("words", "axis"), [("mode=msp tp=3", "tp"), ("mode=isp tp=2 wp=4 dp=2", "wp")])
def test_internevos_ranks_draw_from_streams_of_their_own(words: str, axis: str) -> None:
    """All parameters from seed + rank + 1024 * stage, in order; what is whole is the first rank's, as its broadcasts
    leave it.
    """
    case = Case.parse(f"{SIZES} {words} pp=2 first_layers=1 tied=false init=shard kv_heads=6 vocab=384 seed=5")
    size, parts = getattr(case, axis), {}
    for rank in range(size):
        at = {"tp": (0, case.tp), "pp": (1, 2), "wp": (0, case.wp), axis: (rank, size)}
        held = streams_of(case, at)
        column = Placement(shape=(12, 24), cuts=(Cut(axis=axis, dim=0),))
        values = [
            initial(case, name, place, at, held) for name, place in (("a.w1.weight", column), ("b.weight", WHOLE))
        ]
        own = torch.Generator().manual_seed(5 + rank + 1024)
        drawn_here = torch.empty(12 // size, 24, dtype=torch.float64).normal_(0, 0.02, generator=own)
        assert torch.equal(values[0], drawn_here)
        parts[rank] = values[1], torch.empty(7, 5, dtype=torch.float64).normal_(0, 0.02, generator=own)
    assert all(torch.equal(value, parts[0][1]) for value, _ in parts.values())
    assert not torch.equal(parts[0][1], parts[1][1])


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_both_implementations_of_the_field_begin_alike(dtype: str) -> None:
    case = Case.parse(f"{SIZES} init=field tp=1 dtype={dtype}")
    for name, shape in shapes(case).items():
        mine = initial(case, name, Placement(shape=shape), {}, Streams(seeds(0)))
        assert torch.equal(mine.to(getattr(torch, dtype)), drawn(case, name)), name


def test_values_are_megatrons() -> None:
    """Deviations within six standard errors; residual outputs smaller by sqrt(2 layers)."""
    case = Case.parse(f"{SIZES} init=field tp=1")
    for name, right in {"embedding.tokens.weight": 0.02, "layers.1.mlp.w2.weight": 0.02 / math.sqrt(6)}.items():
        value = drawn(case, name)
        assert abs((float(value.std()) / right) ** 2 - 1) < 6 * math.sqrt(2 / value.numel())
    assert float(drawn(case, "layers.0.mlp.w2.bias").abs().max()) == 0
    assert float((drawn(case, "final_norm.weight") - 1).abs().max()) == 0


def test_shards_of_their_own_are_for_modes_and_stages_that_have_them() -> None:
    with pytest.raises(ValueError, match="init=shard: .* AutoTP cuts weights that it loads"):
        Case.parse("mode=autotp init=shard")
    with pytest.raises(ValueError, match="init=shard: draws on each stage by itself, and tied=true"):
        Case.parse("pp=2 tp=1 init=shard")
    with pytest.raises(ValueError, match="draws values that the dense model must be given, and init/final_norm.weight"):
        drawn(Case.parse("init=shard"), "final_norm.weight")


def test_equal_shards_and_wrong_deviations_are_named() -> None:
    generator = torch.Generator().manual_seed(1)
    one, other = (0.02 * torch.randn(40, 30, generator=generator) for _ in range(2))

    def found(*parts: torch.Tensor, right: float = 0.02) -> tuple[str, str]:
        rows = sum(len(part) for part in parts)
        ranks = [{"init/w": Shard(part, (40 * rank, 0), (rows, 30))} for rank, part in enumerate(parts)]
        finding = initial_values(evidence(*ranks, truth={}, given=("init/w",), deviations={"w": right}))
        assert finding is not None
        return finding.verdict, finding.message

    assert found(one, other)[0] == PASS
    assert found(one, one[:30])[1] == "init/w on rank 1 holds the numbers of init/w on rank 0", "unequal sizes too"
    assert found(one, one) == (FAIL, "init/w on rank 1 holds the numbers of init/w on rank 0")
    verdict, message = found(one, other, right=0.03)
    assert verdict == FAIL and message.endswith("which must be 0.03")
    assert found(one, other, right=0.0)[1].endswith("and begins as a constant")
    assert initial_values(evidence({"loss/0": torch.ones(())})) is None
