"""Every engine takes the arguments that torch takes: one list of calls, made on gloo and in process.

`torch_calls` holds the list. Where gloo lacks a call, or gives a wrong result without a word, `beyond_gloo` states it.
The statement is tried here: a later gloo that can do it fails a test.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import pytest

from shardproof.harness.engines.processes.forked.pool import PoolEngine
from shardproof.harness.engines.threads.inproc import InprocEngine
from tests.deep import deep
from tests.harness.threads.torch_calls import messages  # noqa: F401  (fills the list)
from tests.harness.threads.torch_calls.beyond_gloo import NOT_ON_GLOO, WRONG_ON_GLOO
from tests.harness.threads.torch_calls.collectives import CALLS, plain

RANKS = 4
NAMES = tuple(name for name in CALLS if not name.startswith("beyond gloo"))
OF_ANY_SIZE = (
    "all_reduce_sum", "all_reduce_product", "all_reduce_max", "all_reduce_min", "all_reduce_avg", "all_reduce_band",
    "all_reduce_bor", "all_reduce_bxor", "all_reduce_coalesced", "reduce_scatter_in_every_form", "reduce_scatter_ops",
    "reduce_scatter_of_uneven_lists", "all_gather_in_every_form", "rooted_calls_for_every_root",
    "coalesced_gathers_and_scatters", "coalescing_manager", "splits_as_lists", "splits_empty_or_none",
    "lists_of_equal_sizes", "exchange_dtypes", "gradients_of_functional_collectives", "barriers",
)  # fmt: skip
OF_SEVERAL = ("sends_and_receives", "batched_messages", "messages_from_anybody")


_KINDS = (TypeError, ValueError, RuntimeError, LookupError, AssertionError)


def on_rank(rank: int, size: int, names: Sequence[str]) -> dict[str, Any]:
    """Results of all calls, in plain Python; an exception as a set of the kinds that a program can catch it by."""
    found: dict[str, Any] = {}
    for name in names:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found[name] = plain(CALLS[name](rank, size))
            except Exception as error:
                found[name] = frozenset(kind for kind in _KINDS if isinstance(error, kind))
    return found


@pytest.fixture(scope="module")
def on_gloo(pool: PoolEngine) -> list[dict[str, Any]]:
    return pool.run(on_rank, RANKS, NAMES, world_size=RANKS)


@pytest.mark.parametrize("world_size", [1, *deep("five CPU seconds", 3)])
def test_worlds_of_fewer_ranks(world_size: int, pool: PoolEngine, engine: InprocEngine) -> None:
    names = OF_ANY_SIZE + (OF_SEVERAL if world_size > 1 else ())
    on_gloo, here = (made.run(on_rank, world_size, names, world_size=world_size) for made in (pool, engine))
    assert here == on_gloo
    assert not [name for name in names if isinstance(here[0][name], frozenset)]


def test_threads_give_and_raise_what_gloo_does(on_gloo: list[dict[str, Any]], engine: InprocEngine) -> None:
    """An error in threads can be caught by every kind by which gloo's can be."""
    in_process = engine.run(on_rank, RANKS, NAMES, world_size=RANKS)
    assert len(NAMES) > 120
    different = {
        name
        for name in NAMES
        for there, here in zip(on_gloo, in_process, strict=True)
        if here[name] != there[name] and not _raises_the_same(there[name], here[name])
    }
    assert different == set()


def _raises_the_same(there: Any, here: Any) -> bool:
    return isinstance(there, frozenset) and isinstance(here, frozenset) and there <= here


def test_every_call_of_the_list_sends_something_or_is_a_mistake(on_gloo: list[dict[str, Any]]) -> None:
    """The list itself is sound: what is on it as right is no error on gloo, but for what no backend carries."""
    raised = {name for name in NAMES if any(isinstance(found[name], frozenset) for found in on_gloo)}
    no_mistakes = {name for name in raised if not name.startswith("mistake")}
    assert no_mistakes == {
        "splits_as_one_tensor", "splits_as_floats", "splits_as_numpy_floats", "splits_as_text", "splits_as_sets",
        "all_gather_tuples", "reduce_scatter_of_a_tuple", "lists_as_tuples", "float8_sums",
    }  # fmt: skip


@pytest.mark.parametrize("name", NOT_ON_GLOO)
def test_what_gloo_lacks_is_computed_as_by_nccl(name: str, pool: PoolEngine, engine: InprocEngine) -> None:
    call, entry = f"beyond gloo: {name}", NOT_ON_GLOO[name]
    found = [ranks[call] for ranks in engine.run(on_rank, RANKS, (call,), world_size=RANKS)]
    assert found == [plain(entry.right(rank, RANKS)) for rank in range(RANKS)]
    assert all(isinstance(ranks[call], frozenset) for ranks in pool.run(on_rank, RANKS, (call,), world_size=RANKS))


@pytest.mark.parametrize("name", WRONG_ON_GLOO)
def test_what_gloo_computes_wrong_is_refused(name: str, pool: PoolEngine, engine: InprocEngine) -> None:
    call, entry = f"beyond gloo: {name}", WRONG_ON_GLOO[name]
    assert all(isinstance(ranks[call], frozenset) for ranks in engine.run(on_rank, RANKS, (call,), world_size=RANKS))
    on_gloo = [ranks[call] for ranks in pool.run(on_rank, RANKS, (call,), world_size=RANKS)]
    assert not any(isinstance(found, frozenset) for found in on_gloo)
    assert on_gloo != [plain(entry.right(rank, RANKS)) for rank in range(RANKS)]
