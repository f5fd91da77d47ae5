"""Planted bugs: each is found, by exactly the checks named beside it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from parallel.schedules.checks import Sends, check_legal, delivery
from parallel.schedules.messages import Program, programs
from parallel.schedules.pipeline import Action, Kind, Pipeline, forward_table, warm_up
from tests.parallel.schedules.shapes import broken

Steps = list[list[Action]]
Bug = Callable[[Steps], Steps]
PLAIN = Pipeline(schedule="1f1b", ranks=4, micro=6)
GPIPE = Pipeline(schedule="gpipe", ranks=3, micro=5)
LOOPED = Pipeline(schedule="interleaved", ranks=3, micro=6, chunks=2)
FILLED = Pipeline(schedule="zb-h1", ranks=4, micro=6)
V = Pipeline(schedule="zbv", ranks=3, micro=6, chunks=2)


def first(steps: Steps, kind: Kind, nth: int = 0) -> int:
    """The step of the n-th action of a kind."""
    return [index for index, step in enumerate(steps) if kind in [action.kind for action in step]][nth]


def without(kind: Kind, nth: int) -> Bug:
    """Leave out the n-th message of a kind."""

    def leave_out(steps: Steps) -> Steps:
        at = first(steps, kind, nth)
        kept = [action for action in steps[at] if action.kind is not kind]
        return steps[:at] + [kept] * bool(kept) + steps[at + 1 :]

    return leave_out


def swapped(one: Action, two: Action) -> Bug:
    """Two computations in each other's place; the messages stay where they are."""
    other = {one: two, two: one}
    return lambda steps: [[other.get(action, action) for action in step] for step in steps]


def renamed(kind: Kind, one: int, two: int) -> Bug:
    """The same kind of action of two micro-batches in each other's place, messages with them."""
    messages = {Kind.F: (Kind.RECV_FORWARD, Kind.SEND_FORWARD), Kind.B: (Kind.RECV_BACKWARD, Kind.SEND_BACKWARD)}
    moved, other = (kind, *messages[kind]), {one: two, two: one}
    return lambda steps: [
        [
            action._replace(micro=other.get(action.micro, action.micro)) if action.kind in moved else action
            for action in s
        ]
        for s in steps
    ]


def weights_first(steps: Steps) -> Steps:
    """The first weight gradient before its backward."""
    at = first(steps, Kind.W)
    weight = steps[at]
    before = next(i for i, s in enumerate(steps) if s[0] == weight[0]._replace(kind=Kind.B))
    return steps[:before] + [weight] + steps[before:at] + steps[at + 1 :]


def without_last_weight(steps: Steps) -> Steps:
    """The last weight gradient is forgotten."""
    return steps[:-1]


def twice(steps: Steps) -> Steps:
    """The last forward is that of the first micro-batch again."""
    at = [index for index, step in enumerate(steps) if step[0].kind is Kind.F][-1]
    return steps[:at] + [[steps[at][0]._replace(micro=0)]] + steps[at + 1 :]


def late(steps: Steps) -> Steps:
    """A receive only after the computation that needs it."""
    at = first(steps, Kind.RECV_FORWARD)
    return steps[:at] + [steps[at + 1], steps[at]] + steps[at + 2 :]


def all_forwards_first(steps: Steps) -> Steps:
    """GPipe under the name of 1F1B: the computations in another order, each with its own receive and send."""
    parts: dict[bool, Steps] = {True: [], False: []}
    kept = {
        True: (Kind.F, Kind.RECV_FORWARD, Kind.SEND_FORWARD),
        False: (Kind.B, Kind.RECV_BACKWARD, Kind.SEND_BACKWARD),
    }
    for forward, kinds in kept.items():
        parts[forward] = [[action] for step in steps for action in step if action.kind in kinds]
    return parts[True] + parts[False]


BUGS: dict[str, tuple[Pipeline, int | None, Bug, set[str]]] = {
    "last receive missing": (PLAIN, 3, without(Kind.RECV_FORWARD, 5), {"conserved", "legal"}),
    "first gradient not sent": (PLAIN, 3, without(Kind.SEND_BACKWARD, 0), {"conserved", "legal", "sends"}),
    "received after it is needed": (PLAIN, 1, late, {"legal"}),
    "cool-down in reverse": (PLAIN, 0, renamed(Kind.B, 4, 5), {"legal", "time"}),
    "gradients of two micro-batches swapped, with nothing sent amiss": (
        PLAIN,
        3,
        swapped(Action(Kind.B, 1, 0, 3), Action(Kind.B, 2, 0, 3)),
        {"legal", "time"},
    ),
    "all forwards first": (PLAIN, None, all_forwards_first, {"live"}),
    "a micro-batch twice": (GPIPE, 0, twice, {"complete", "legal", "time"}),
    "backward in reverse on one rank": (GPIPE, 1, renamed(Kind.B, 0, 4), {"legal", "time"}),
    "loop not closed": (LOOPED, 0, without(Kind.RECV_FORWARD, 0), {"conserved", "legal"}),
    "weight before input gradient": (FILLED, 2, weights_first, {"legal", "time"}),
    "last weight gradient forgotten": (FILLED, 0, without_last_weight, {"complete", "time"}),
    "last weight gradient forgotten in the V": (V, 2, without_last_weight, {"complete", "time"}),
}


def planted(pipeline: Pipeline, rank: int | None, bug: Bug) -> list[Program]:
    """The programs with a bug on one rank, or on all."""
    made = [[list(step) for step in steps] for steps in programs(pipeline)]
    return [tuple(map(tuple, bug(s) if rank in (None, index) else s)) for index, s in enumerate(made)]


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found_by_these_checks(name: str) -> None:
    pipeline, rank, bug, checks = BUGS[name]
    assert not broken(pipeline, programs(pipeline))
    found = broken(pipeline, planted(pipeline, rank, bug))
    assert set(found) == checks, found


def shorter(pipeline: Pipeline, rank: int) -> int:
    """A warm-up that is one short."""
    return max(0, warm_up(pipeline, rank) - 1)


def longer(pipeline: Pipeline, rank: int) -> int:
    """A warm-up that is one too long."""
    return min(pipeline.micro * pipeline.chunks, warm_up(pipeline, rank) + 1)


def of_one_chunk(pipeline: Pipeline, rank: int) -> int:
    """The warm-up of 1F1B where there are chunks."""
    return pipeline.ranks - 1 - rank


def none_at_the_end(pipeline: Pipeline, rank: int) -> int:
    """A warm-up that counts ranks from the first, not from the last."""
    return warm_up(pipeline, pipeline.ranks - 1 - rank)


@pytest.mark.parametrize(
    ("pipeline", "wrong", "checks"),
    [
        (PLAIN, shorter, {"live", "time"}),
        (PLAIN, longer, {"live"}),
        (PLAIN, none_at_the_end, {"legal", "live", "time"}),
        (FILLED, shorter, {"live", "time"}),
        (LOOPED, shorter, {"legal", "live", "time"}),
        (LOOPED, longer, {"live"}),
        (LOOPED, of_one_chunk, {"legal", "live", "time"}),
    ],
)
def test_a_wrong_warm_up_is_found_by_these_checks(
    pipeline: Pipeline, wrong: Callable[[Pipeline, int], int], checks: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parallel.schedules.pipeline.warm_up", wrong)
    monkeypatch.setattr("parallel.schedules.messages.warm_up", wrong)
    assert set(broken(pipeline, programs(pipeline))) == checks


def test_chunks_backward_in_the_order_of_the_forward_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parallel.schedules.pipeline.backward_table", forward_table)
    monkeypatch.setattr("parallel.schedules.messages.backward_table", forward_table)
    # A receive is due after the neighbour's send, which now comes after the end: it is never issued.
    assert set(broken(LOOPED, programs(LOOPED))) == {"conserved", "legal", "time"}


def test_interleaved_on_two_ranks_swaps_activations_and_gradients_in_one_group() -> None:
    """around.md 13.4 PP1: one batch, one peer, two ways. With as many micro-batches as ranks nothing is swapped."""
    pipeline = Pipeline(schedule="interleaved", ranks=2, micro=4, chunks=2)
    assert delivery(pipeline) == (Sends.BATCHED, 2)
    assert not check_legal(pipeline, programs(pipeline), Sends.BATCHED, 2)
    found = check_legal(pipeline, programs(pipeline), Sends.BATCHED, 1)
    assert any("recv_backward" in breach and "meets send_forward" in breach for breach in found), found
    hidden = Pipeline(schedule="interleaved", ranks=2, micro=2, chunks=2)
    assert not check_legal(hidden, programs(hidden), Sends.BATCHED, 1)
    three = Pipeline(schedule="interleaved", ranks=3, micro=6, chunks=2)
    assert not check_legal(three, programs(three), Sends.BATCHED, 1)


def test_the_v_needs_two_groups_and_sends_that_do_not_wait() -> None:
    assert not check_legal(V, programs(V), Sends.BUFFERED, 2)
    assert check_legal(V, programs(V), Sends.BUFFERED, 1)
    assert check_legal(V, programs(V), Sends.BATCHED, 2)
