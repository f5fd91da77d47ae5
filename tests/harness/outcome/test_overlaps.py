"""Shards of any extent: where they overlap they agree in every bit, or are a conflict; what none holds is a gap."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardproof.harness.outcome.blocks import localize
from shardproof.harness.outcome.merging import merge
from shardproof.harness.protocols import Shard


@given(st.data())
def test_shards_of_any_extent_that_agree_where_they_overlap_merge_and_one_other_element_is_a_conflict(
    data: st.DataObject,
) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    full = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    held, boxes = torch.zeros(shape, dtype=torch.int64), list[tuple[slice, ...]]()
    for _ in range(data.draw(st.integers(2, 5))):
        ends = [sorted(data.draw(st.sets(st.integers(0, size), min_size=2, max_size=2))) for size in shape]
        boxes.append(tuple(slice(a, b) for a, b in ends))
        held[boxes[-1]] += 1
    starts = [tuple(part.start for part in box) for box in boxes]
    outcomes = [{"w": Shard(full[box].clone(), at, shape)} for box, at in zip(boxes, starts, strict=True)]
    merged = merge([localize(outcome) for outcome in outcomes])
    missing = (held == 0).nonzero().tolist()
    if not missing:
        assert merged.flaws == () and torch.equal(merged.tensors["w"], full)
    else:
        (flaw,) = merged.flaws
        first = f"first missing at {tuple(missing[0])}"
        assert (flaw.kind, flaw.message) == (
            "omission",
            f"{len(missing)} of {full.numel()} elements are held by no rank; {first}",
        )
    if several := (held > 1).nonzero().tolist():
        place = tuple(data.draw(st.sampled_from(several)))
        holders = [
            rank
            for rank, box in enumerate(boxes)
            if all(part.start <= i < part.stop for part, i in zip(box, place, strict=True))
        ]
        wrong = data.draw(st.sampled_from(holders))
        outcomes[wrong]["w"].local[tuple(i - at for i, at in zip(place, starts[wrong], strict=True))] += 0.5
        (flaw,) = merge([localize(outcome) for outcome in outcomes]).flaws
        assert flaw.kind == "replica conflict" and flaw.ranks and {*flaw.ranks} <= {*holders}
        assert f"rank {wrong} " in flaw.message and " in 1 of " in flaw.message and "by up to 0.5" in flaw.message
