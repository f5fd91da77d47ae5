"""The field of random numbers: the published function, equal numbers on every layout; initial values by formula."""

import math
from typing import Any

import pytest
import torch

from shardproof.harness.checking.state_checks import check_initial_values
from shardproof.harness.protocols import Shard
from shardproof.harness.verdicts.verdict import FAIL, PASS
from shardproof.parallel.communication.layout import Cut, Placement
from shardproof.parallel.layers.randomness import (
    CONTEXT_STRIDE,
    EXPERT,
    MODEL_PARALLEL,
    Streams,
    initial_value,
    philox,
    stream_seeds,
    streams_of,
)
from shardproof.reference.case import Case
from shardproof.reference.model.parameters import drawn_weight
from shardproof.reference.model.randomness import philox4x32
from tests.harness.toy_evidence import answer_of, evidence
from tests.parallel.case_tables import TABLES

KNOWN = (
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
)
"""Counter, key and words of philox4x32-10 in Random123's kat_vectors."""


@pytest.mark.parametrize(("counter", "key", "right"), KNOWN)
def test_both_implementations_are_the_published_function(counter: str, key: str, right: str) -> None:
    c, k, words = ([int(word, 16) for word in text.split()] for text in (counter, key, right))
    assert [int(word) for word in philox((k[0], k[1]), [torch.tensor([word]) for word in c])] == words
    assert philox4x32(torch.tensor(c), k).tolist() == words


def drawn(streams: Streams, count: int = 3) -> list[float]:
    return torch.rand(count, generator=streams.generator).tolist()


def of_seed(seed: int, count: int) -> list[float]:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize(
    ("ranks", "right"),
    [
        ({"tp_rank": 1, "ep_rank": 2, "etp_rank": 1}, (1234, 3953, 2459)),
        ({"pp_rank": 3, "tp_rank": 5}, (1534, 4257, 2558)),
        ({"cp_rank": 1}, tuple(CONTEXT_STRIDE + seed for seed in (1234, 3952, 2258))),
    ],
)
def test_seeds_are_megatrons(ranks: dict[str, Any], right: tuple[int, ...]) -> None:
    """The first row is what Megatron-Core 0.16.1 gives; the others follow from its formula, with our term of cp."""
    assert tuple(stream_seeds(1234, **ranks).values()) == right


def test_the_largest_seed_of_a_case_has_streams() -> None:
    Streams(stream_seeds(2**64 - 1, tp_rank=3))


def test_nested_forks_go_on_with_their_streams() -> None:
    """Attention dropout inside a block that is forked already; Megatron before 0.16 drew the block's numbers again."""
    streams = Streams(stream_seeds(7))
    with streams.fork(MODEL_PARALLEL):
        found = drawn(streams, 2)
        with streams.fork(MODEL_PARALLEL):
            found += drawn(streams, 2)
        with streams.fork(EXPERT):
            with streams.fork(MODEL_PARALLEL):
                found += drawn(streams, 2)
            assert drawn(streams, 1) == of_seed(7 + 1024, 1)
        found += drawn(streams, 2)
    assert found == of_seed(7 + 2718, 8)
    assert drawn(streams, 1) == of_seed(7, 1)


def test_a_fork_ends_with_an_error_too() -> None:
    streams = Streams(stream_seeds(7))
    with pytest.raises(KeyError), streams.fork(MODEL_PARALLEL):
        raise KeyError
    with pytest.raises(ValueError, match="name=router: is no stream; legal: data-parallel-rng"), streams.fork("router"):
        pass
    with pytest.raises(ValueError, match="must be those of the streams"):
        streams.load_state_dict({MODEL_PARALLEL: torch.zeros(1)})
    assert drawn(streams, 1) == of_seed(7, 1)


def test_states_are_saved_and_restored_inside_of_a_fork() -> None:
    """Saved states are copies (TransformerEngine #1723 kept aliases); after a repetition all streams go on."""
    streams = Streams(stream_seeds(7))
    with streams.fork(MODEL_PARALLEL):
        drawn(streams)
        saved = streams.state_dict()
        first = drawn(streams)
        with streams.fork(EXPERT):
            first += drawn(streams)
        with streams.rewound(saved):
            again = drawn(streams)
            with streams.fork(EXPERT):
                again += drawn(streams)
        assert again == first
        following = drawn(streams)
    resumed = Streams(stream_seeds(99))
    resumed.load_state_dict(saved)
    assert drawn(resumed) == of_seed(7, 3)
    with resumed.fork(MODEL_PARALLEL):
        assert drawn(resumed) + drawn(resumed) == first[:3] + following


WHOLE = Placement(shape=(7, 5))
SIZES = TABLES["initial"].sizes


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
            initial_value(case, name, place, at, held) for name, place in (("a.w1.weight", column), ("b.weight", WHOLE))
        ]
        own = torch.Generator().manual_seed(5 + rank + 1024)
        drawn_here = torch.empty(12 // size, 24, dtype=torch.float64).normal_(0, 0.02, generator=own)
        assert torch.equal(values[0], drawn_here)
        parts[rank] = values[1], torch.empty(7, 5, dtype=torch.float64).normal_(0, 0.02, generator=own)
    assert all(torch.equal(value, parts[0][1]) for value, _ in parts.values())
    assert not torch.equal(parts[0][1], parts[1][1])


def test_values_are_megatrons() -> None:
    """Deviations within six standard errors; residual outputs smaller by sqrt(2 layers)."""
    case = Case.parse(f"{SIZES} init=field tp=1")
    for name, right in {"embedding.tokens.weight": 0.02, "layers.1.mlp.w2.weight": 0.02 / math.sqrt(6)}.items():
        value = drawn_weight(case, name)
        assert abs((float(value.std()) / right) ** 2 - 1) < 6 * math.sqrt(2 / value.numel())
    assert float(drawn_weight(case, "layers.0.mlp.w2.bias").abs().max()) == 0
    assert float((drawn_weight(case, "final_norm.weight") - 1).abs().max()) == 0


def test_the_dense_model_must_be_given_values_that_ranks_draw() -> None:
    with pytest.raises(ValueError, match="draws values that the dense model must be given, and init/final_norm.weight"):
        drawn_weight(Case.parse("init=shard"), "final_norm.weight")


def test_equal_shards_and_wrong_deviations_are_named() -> None:
    generator = torch.Generator().manual_seed(1)
    one, other = (0.02 * torch.randn(40, 30, generator=generator) for _ in range(2))

    def found(*parts: torch.Tensor, right: float = 0.02) -> tuple[str, str]:
        rows = sum(len(part) for part in parts)
        ranks = [{"init/w": Shard(part, (40 * rank, 0), (rows, 30))} for rank, part in enumerate(parts)]
        finding = answer_of(
            check_initial_values, evidence(*ranks, truth={}, from_ranks=("init/w",), init_std={"w": right})
        )
        return finding.verdict, finding.message

    assert found(one, other)[0] == PASS
    assert found(one, one[:30])[1] == "init/w on rank 1 holds the numbers of init/w on rank 0", "unequal sizes too"
    assert found(one, one) == (FAIL, "init/w on rank 1 holds the numbers of init/w on rank 0")
    verdict, message = found(one, other, right=0.03)
    assert verdict == FAIL and message.endswith("which must be 0.03")
    assert found(one, other, right=0.0)[1].endswith("and begins as a constant")
    shared = [{"init/w": Shard(part, (0, 0), (40, 30))} for part in (one[:20], one)]  # a head that two ranks hold
    seen = evidence(*shared, truth={}, from_ranks=("init/w",), init_std={"w": 0.02})
    assert answer_of(check_initial_values, seen).verdict == PASS
