"""What operators did with the results of calls, read from torch's own execution trace of a program that plants both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from harness.errors import MachineError
from harness.programs.execution_trace import TracedOperator, Used, flops, nodes_of, used
from tests.forked import started

LOOPS, ROWS, WIDTH = 2, 3, 5


def planted_rank(folder: str) -> int:
    """Of each loop's six calls the first result and the first gather are never read, and the second gather repeats."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    observer = torch.profiler.ExecutionTraceObserver().register_callback(f"{folder}/rank0.et.json")
    observer.start()
    weight = torch.ones(WIDTH, 7)
    for _ in range(LOOPS):
        lost = torch.ones(11)
        dist.all_reduce(lost)
        kept = torch.ones(ROWS, WIDTH)
        dist.all_reduce(kept)
        product = kept @ weight
        gathered = [torch.empty(ROWS, 7)]
        dist.all_gather(gathered, product)
        dist.all_gather(gathered, product)
        counted = torch.ones(2)
        dist.all_reduce(counted[1:])
        counted.tolist()
        product.add_(1)
        dist.all_gather(gathered, product)
        gathered[0].sum().item()
    observer.stop()
    observer.unregister_callback()
    dist.destroy_process_group()
    return 0


def test_unread_results_and_repeated_gathers_are_found_and_flops_counted(tmp_path: Path) -> None:
    assert started(planted_rank, str(tmp_path), folder=tmp_path).ended() == 0
    nodes = nodes_of(tmp_path / "rank0.et.json")
    reduced = [("all_reduce", True, False), ("all_reduce", False, False)]
    gathered = [("all_gather", True, False), ("all_gather", True, True)]
    loop = [*reduced, *gathered, ("all_reduce", False, False), ("all_gather", False, False)]
    first = [Used(op=op, unread=unread, repeated=repeated) for op, unread, repeated in loop]
    assert used(nodes, settled=len(loop))[: len(loop)] == first
    assert [one.op for one in used(nodes)] == [op for op, _, _ in loop] * LOOPS
    assert [one.repeated for one in used(nodes)[len(loop) :]] == [repeated for _, _, repeated in loop]
    assert not used(nodes)[len(loop)].unread  # nothing has happened to its memory, and the trace ends
    assert flops(nodes) == LOOPS * 2 * ROWS * WIDTH * 7


def operator(number: int, name: str, schema: str, *inputs: object) -> TracedOperator:
    """A leaf of the trace."""
    words: dict[str, Any] = {"shapes": (), "types": (), "outputs": (), "out_shape": None}
    return TracedOperator(number=number, parent=0, thread=1, name=name, schema=schema, inputs=inputs, **words)


@pytest.mark.parametrize(("parts_read", "unread"), [((), True), ((1,), False), ((0, 1), False)])
def test_a_result_of_which_a_part_is_read_is_read(parts_read: tuple[int, ...], unread: bool) -> None:
    """A gather gives one tensor a rank; a rank that reads those of others alone has read it."""
    parts = [[place, place + 10, 0, 6, 4, "cpu"] for place in range(2)]  # tensor, storage, offset, elements, bytes
    nodes = [
        operator(
            1, "c10d::allgather_", "(Tensor[][] outputs, Tensor[] inputs) -> ()", [parts], [[9, 9, 0, 6, 4, "cpu"]]
        )
    ]
    nodes += [operator(2, "aten::sum", "aten::sum(Tensor self) -> (Tensor)", parts[place]) for place in parts_read]
    nodes += [operator(3, "aten::zero_", "aten::zero_(Tensor(a!) self) -> (Tensor(a!))", part) for part in parts]
    assert [one.unread for one in used(nodes)] == [unread]


def test_what_is_no_execution_trace_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "rank0.et.json").write_text("[1]")
    with pytest.raises(MachineError, match="execution trace: .*rank0.et.json cannot be read"):
        nodes_of(tmp_path / "rank0.et.json")
