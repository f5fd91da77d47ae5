"""all_to_all in both forms, with split sizes of every kind that torch takes."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tests.harness.threads.torch_calls.listed import CALLS, DTYPES, changed, dist, each, filled, listed, own


def rows(sender: int, receiver: int) -> int:
    """Rows that one rank sends to another: none for some."""
    return (sender + 2 * receiver) % 3


def exchanged(rank: int, size: int, kind: Callable[[Sequence[int]], Any]) -> torch.Tensor:
    sends, expects = ([rows(rank, other) for other in range(size)], [rows(other, rank) for other in range(size)])
    out = filled(sum(expects), 2)
    dist.all_to_all_single(out, own(rank, sum(sends), 2), kind(expects), kind(sends))
    return out


SPLITS: dict[str, Callable[[Sequence[int]], Any]] = {
    "lists": list,
    "tuples": tuple,
    "numpy_arrays": np.array,
    "numpy_integers": lambda counts: [np.int32(count) for count in counts],
    "tensors_of_one_number": lambda counts: [torch.tensor(count) for count in counts],
    "one_tensor": torch.tensor,
    "sizes": torch.Size,
    "floats": lambda counts: [float(count) for count in counts],
    "numpy_floats": lambda counts: np.array(counts, dtype=np.float64),
    "float_tensors": lambda counts: [torch.tensor(float(count)) for count in counts],
    "text": lambda counts: "".join(map(str, counts)),
}
CALLS.update({f"splits_as_{name}": functools.partial(exchanged, kind=kind) for name, kind in SPLITS.items()})


CALLS |= {
    "splits_as_ranges": lambda r, n: changed(
        filled(r * n, 1), lambda out: dist.all_to_all_single(out, own(r, sum(range(n)), 1), [r] * n, range(n))
    ),
    "splits_as_truths": lambda r, n: changed(
        filled(n), lambda out: dist.all_to_all_single(out, own(r, n), [True] * n, [np.bool_(True)] * n)
    ),
    "splits_as_sets": lambda r, n: changed(filled(n), lambda out: dist.all_to_all_single(out, own(r, n), {1}, {1})),
    "splits_into_another_shape": lambda r, n: changed(
        filled(n, 2), lambda out: dist.all_to_all_single(out, own(r, 2 * n))
    ),
    "lists_of_views": lambda r, n: changed(
        filled(2 * n, 3), lambda out: dist.all_to_all(list(out.chunk(n)), list(own(r, 2 * n, 3).chunk(n)))
    ),
    "lists_as_tuples": lambda r, n: changed(
        filled(2 * n), lambda out: dist.all_to_all(out.chunk(n), own(r, 2 * n).chunk(n))
    ),
    "lists_of_columns": lambda r, n: changed(
        filled(n, 3), lambda out: dist.all_to_all(list(out), list(own(r, 3, n).unbind(1)))
    ),
}


@listed
class Exchanges:
    def splits_empty_or_none(self, rank: int, size: int) -> Any:
        outs = [filled(2 * size, 3) for _ in range(4)]
        dist.all_to_all_single(outs[0], own(rank, 2 * size, 3))
        dist.all_to_all_single(outs[1], own(rank, 2 * size, 3), None, None)
        dist.all_to_all_single(outs[2], own(rank, 2 * size, 3), [], [])
        work = dist.all_to_all_single(output=outs[3], input=own(rank, 2 * size, 3), async_op=True)
        work.wait()
        return outs

    def splits_on_one_side(self, rank: int, size: int) -> Any:
        outs = [filled(2 * size) for _ in range(2)]
        dist.all_to_all_single(outs[0], own(rank, 2 * size), output_split_sizes=[2] * size)
        dist.all_to_all_single(outs[1], own(rank, 2 * size), input_split_sizes=np.array([2] * size))
        return outs

    def splits_of_nothing(self, rank: int, size: int) -> Any:
        none, one = filled(0, 3), filled(1 if rank == 1 else 0, 3)
        dist.all_to_all_single(none, filled(0, 3), [0] * size, [0] * size)
        dist.all_to_all_single(filled(0, 3), filled(0, 3))
        dist.all_to_all_single(
            one,
            own(rank, int(rank == 2), 3),
            [int(rank == 1 and i == 2) for i in range(size)],
            [int(rank == 2 and i == 1) for i in range(size)],
        )
        return none, one

    def exchange_dtypes(self, rank: int, size: int) -> Any:
        def call(dtype: torch.dtype) -> Any:
            out = filled(size, dtype=dtype)
            dist.all_to_all_single(out, own(rank, size, dtype=dtype))
            return out

        return each(DTYPES, call)

    def lists_of_equal_sizes(self, rank: int, size: int) -> Any:
        again = [filled(2) for _ in range(size)]
        dist.all_to_all(
            output_tensor_list=again, input_tensor_list=[own(rank + i, 2) for i in range(size)], async_op=True
        ).wait()
        return again
