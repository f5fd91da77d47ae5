"""Interposer and in-process engine: every way to communicate is seen once, as what it is, and nothing else changes."""

import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from shardproof.harness.engines.interposer import Interposer
from shardproof.harness.errors import MachineError
from shardproof.harness.ledger import Event
from shardproof.harness.torch_internals.backends import fake_group
from tests.forked import started
from tests.harness.engines.programs import Log
from tests.harness.recording import interposed_calls
from tests.harness.recording.toy_calls import recorded

Said = tuple[str, str, int, str, str, int, bool]
"""Op, reduce op, group size, dtype, shape, payload bytes, asynchronous."""


def said(event: Event) -> Said:
    return (event.op, event.reduce_op, event.group_size, event.dtype, event.shape, event.payload_bytes, event.is_async)


def call(
    op: str,
    reduce_op: str = "",
    shape: str = "4",
    payload: int = 16,
    *,
    dtype: str = "float32",
    size: int = 2,
    later: bool = False,
) -> Said:
    return op, reduce_op, size, dtype, shape, payload, later


EXPECTED: dict[str, list[Said]] = {
    "reductions": [
        call("all_reduce", "sum"),
        call("all_reduce", "max", later=True),
        call("all_reduce", "product", payload=8, dtype="bfloat16"),
        call("all_reduce", "sum", "", 4, size=1),
        call("all_reduce", "sum", "10", 40),
    ],
    "rooted": [call("broadcast"), call("reduce", "min"), call("gather"), call("scatter")],
    "gathers": [
        call("all_gather", "", "4+4", 32),
        call("all_gather", "", "8", 32),
        call("reduce_scatter", "sum", "4+4", 32),
        call("reduce_scatter", "sum", "8", 32),
    ],
    "exchanges": [call("all_to_all"), call("all_to_all"), call("all_to_all", "", "4+4", 32)],
    "barriers": [call("barrier", "", "", 0, dtype="")] * 2,
    "coalesced": [
        call("all_reduce", "sum", "4+2x3", 40),
        call("all_reduce", "sum", "4+2", 24),
        call("all_gather", "", "8+4", 48),
    ],
    "objects": [
        call("all_gather", "", "1+1", 16, dtype="int64"),
        call("all_gather", "", "18+18", 36, dtype="uint8"),
        call("broadcast", "", "1", 8, dtype="int64"),
        call("broadcast", "", "18", 18, dtype="uint8"),
    ],
    "functionals": [
        call("all_reduce", "sum", later=True),
        call("all_gather", "", "8", 32, later=True),
        call("reduce_scatter", "max", "8", 32, later=True),
        call("all_to_all", later=True),
        call("broadcast", later=True),
        call("all_reduce", "sum", "4+2", 24, later=True),
        call("reduce_scatter", "sum", "8", 32, later=True),
        call("all_gather", "", "8", 32, later=True),
        call("all_reduce", "sum", later=True),
    ],
    "elsewhere": [call("all_reduce", "sum"), call("all_reduce", "sum"), call("all_reduce", "sum", later=True)],
    "compiled": [call("all_reduce", "sum", later=True)] * 2,
}
"""Calls that both ranks must be seen to issue, where they issue the same; worked out from the scenarios by hand."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Events that each of two gloo ranks saw."""
    folder = tmp_path_factory.mktemp("interposed")
    processes = [started(interposed_calls.on_rank, rank, folder, folder=folder) for rank in range(2)]
    assert [process.ended(120) for process in processes] == [0, 0], processes[0].err
    return [pickle.loads((folder / f"rank{rank}").read_bytes()) for rank in range(2)]


@pytest.fixture(scope="module")
def threads() -> list[dict[str, list[Event]]]:
    """Events that two ranks of the in-process engine saw, with its own groups."""
    found: list[dict[str, list[Event]]] = [{}, {}]
    with warnings.catch_warnings(action="ignore"):
        for name in (*EXPECTED, "messages"):
            for event in recorded(interposed_calls.SCENARIOS[name], 2, {"tp": ((0, 1),)}):
                found[event.rank].setdefault(name, []).append(event)
    return found


def test_every_call_is_seen_once_as_it_is(ranks: list[dict[str, Any]], threads: list[dict[str, list[Event]]]) -> None:
    for results in (*ranks, *threads):
        assert {name: [said(event) for event in results[name]] for name in EXPECTED} == EXPECTED
    batch = [call("send", later=True), call("recv", later=True)]
    for results, op in zip((*ranks, *threads), ("send", "recv") * 2, strict=True):
        assert [said(e) for e in results["messages"]] == [call(op), call(op, later=True), call(op), *batch]


def test_calls_have_axis_wire_bytes_line_and_times_but_no_duration_if_asynchronous(ranks: list[dict[str, Any]]) -> None:
    for rank, results in enumerate(ranks):
        assert [e.axis for e in results["reductions"]] == ["tp", "tp", "tp", f"alone{rank}", "tp"]
        assert [e.wire_bytes for e in results["reductions"]] == [16, 16, 8, 0, 40]
    source = Path(__file__).with_name("interposed_calls.py").read_text().splitlines()
    for event in ranks[0]["gathers"]:
        file, _, line = event.caller.rpartition(":")
        assert file.endswith("interposed_calls.py")
        assert event.op in source[int(line) - 1]
    for event in ranks[0]["reductions"] + ranks[0]["functionals"]:
        assert (event.duration_us > 0) is not event.is_async
    starts = [event.start_us for event in ranks[0]["reductions"]]
    assert starts == sorted(starts)
    assert starts[0] > 0


def test_ddp_is_seen_in_its_constructor_and_in_its_reducer(ranks: list[dict[str, Any]]) -> None:
    events = ranks[0]["ddp"]
    assert [(e.step, e.phase, e.region, e.op, e.dtype, e.payload_bytes) for e in events] == [
        (0, "data", "", "all_gather", "int64", 16),
        (0, "data", "", "broadcast", "int64", 96),
        (0, "data", "", "broadcast", "float32", 120),
        (0, "backward", "0", "all_reduce", "float32", 120),
        (1, "forward", "", "broadcast", "int32", 20),
        (1, "forward", "", "broadcast", "int32", 4),
        (1, "backward", "0", "all_reduce", "float32", 120),
        (2, "backward", "0", "all_reduce", "float32", 120),
    ]


def test_fsdp_is_seen_where_its_layers_are(ranks: list[dict[str, Any]]) -> None:
    """A layer's weights for backward are fetched ahead, in the backward of the layer before."""
    for results in ranks:
        assert [(e.phase, e.region, e.op, e.payload_bytes) for e in results["fsdp"]] == [
            ("forward", "0", "all_gather", 80),
            ("forward", "1", "all_gather", 80),
            ("backward", "1", "all_gather", 80),
            ("backward", "1", "all_gather", 80),
            ("backward", "1", "reduce_scatter", 80),
            ("backward", "0", "reduce_scatter", 80),
        ]


def test_recording_changes_no_bit_of_ddp_and_ends_with_the_interposer(ranks: list[dict[str, Any]]) -> None:
    for results in ranks:
        pairs = list(zip(results["bare"], results["ddp results"], strict=True))
        assert len(pairs) == 4
        assert all(torch.equal(bare, recorded) for bare, recorded in pairs)
        assert results["after"] == []


def test_two_interposers_at_once_are_refused_and_the_first_goes_on() -> None:
    observer = Log()
    with Interposer(observer):
        with pytest.raises(MachineError, match="has a kernel at BackendSelect already.*leave the other one first"):
            Interposer(Log()).__enter__()
        one_call()
    one_call()
    assert len(observer.calls) == 1
    with Interposer(observer):
        one_call()
    assert len(observer.calls) == 2


def test_a_torch_without_operators_or_one_that_is_read_wrongly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as blind:
        blind.setattr("shardproof.harness.engines.interposer.c10d_operators", lambda: [])
        with pytest.raises(MachineError, match="torch .*blind: no operators of c10d are known"):
            Interposer(Log()).__enter__()

    def storage(argument: Any) -> list[torch.Tensor]:
        return [tensor.new_empty(tensor.untyped_storage().nbytes() // 4) for tensor in argument]

    monkeypatch.setattr("shardproof.harness.engines.calls.operators.tensors_in", storage)
    with pytest.raises(MachineError, match="probe all_reduce of 12 bytes was seen as .*32"):
        Interposer(Log()).__enter__()
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "BackendSelect")


def one_call() -> None:
    fake_group().allreduce([torch.ones(4)]).wait()
