"""Named streams: Megatron's seeds, forks that nest, refusals, states that are saved and restored."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallel.randomness.streams import CONTEXT_STRIDE, DEFAULT, EXPERT, MODEL_PARALLEL, Streams, seeds


def drawn(streams: Streams, count: int = 3) -> list[float]:
    return torch.rand(count, generator=streams.generator).tolist()


def of_seed(seed: int, count: int) -> list[float]:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize(
    ("ranks", "right"),
    [
        ({"tp_rank": 1, "ep_rank": 2, "etp_rank": 1}, (1234, 3953, 2459)),
        ({"pp_rank": 3, "tp_rank": 5}, (1534, 4257, 2558)),
        ({"dp_rank": 4}, (1234, 3952, 2258)),
        ({"dp_rank": 4, "data_parallel_random_init": True}, (1274, 3992, 2298)),
        ({"cp_rank": 1}, tuple(CONTEXT_STRIDE + seed for seed in (1234, 3952, 2258))),
    ],
)
def test_seeds_are_megatrons(ranks: dict[str, Any], right: tuple[int, ...]) -> None:
    """The first row is what Megatron-Core 0.16.1 gives; the others follow from its formula, with our term of cp."""
    assert tuple(seeds(1234, **ranks).values()) == right


def test_the_largest_seed_of_a_case_has_streams() -> None:
    Streams(seeds(2**64 - 1, tp_rank=3))


def test_a_fork_draws_its_own_numbers_and_leaves_the_others() -> None:
    streams = Streams(seeds(7, tp_rank=2))
    mine = drawn(streams, 2)
    with streams.fork(MODEL_PARALLEL):
        assert drawn(streams, 4) == of_seed(7 + 2720, 4)
    assert mine + drawn(streams, 2) == of_seed(7, 4)


def test_nested_forks_go_on_with_their_streams() -> None:
    """Attention dropout inside a block that is forked already; Megatron before 0.16 drew the block's numbers again."""
    streams = Streams(seeds(7))
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
    streams = Streams(seeds(7))
    with pytest.raises(KeyError), streams.fork(MODEL_PARALLEL):
        raise KeyError
    assert drawn(streams, 1) == of_seed(7, 1)


def test_streams_that_would_draw_the_same_are_refused() -> None:
    """Megatron's seeds meet where 100 * ep_rank + etp_rank - tp_rank = 1694."""
    with pytest.raises(ValueError, match="seed=2724: is that of model-parallel-rng"):
        Streams(seeds(0, tp_rank=6, ep_rank=17))
    streams = Streams(seeds(0))
    with pytest.raises(ValueError, match="name=expert-parallel-rng: is a stream already"):
        streams.add(EXPERT, 5)
    with pytest.raises(ValueError, match="name=router: is no stream; legal: data-parallel-rng"), streams.fork("router"):
        pass
    with pytest.raises(ValueError, match="must be those of the streams"):
        streams.load_state_dict({DEFAULT: torch.zeros(1)})


def test_states_are_saved_and_restored_inside_of_a_fork() -> None:
    """Saved states are copies (TransformerEngine #1723 kept aliases); after a repetition all streams go on."""
    streams = Streams(seeds(7))
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
    resumed = Streams(seeds(99))
    resumed.load_state_dict(saved)
    assert drawn(resumed) == of_seed(7, 3)
    with resumed.fork(MODEL_PARALLEL):
        assert drawn(resumed) + drawn(resumed) == first[:3] + following
