"""Sentences on what traces do not know, and which option of their profiler records it."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from shardproof.harness.errors import ranks_text
from shardproof.harness.traces.calls import FLIGHT_RECORDER, NSYS, TORCH, Trace, TracedCall

UNKNOWN = "?"
"""The ledger's word for a word that a trace does not know."""
_NEVER = "no option records it"
_FIELDS: Mapping[str, Callable[[TracedCall], bool]] = {
    "payload": lambda call: call.payload_bytes is None,
    "dtype": lambda call: not call.dtype and call.op != "barrier",
    "size of the group": lambda call: call.group_size is None,
    "ranks of the group": lambda call: not call.group,
    "step": lambda call: call.step is None,
    "phase": lambda call: not call.phase,
    "module": lambda call: call.module is None,
    "line": lambda call: not call.caller,
    "duration": lambda call: call.device_us is None,
    "reduce op": lambda call: not call.reduce_op and call.op in ("all_reduce", "reduce_scatter", "reduce"),
}
_OPTIONS: Mapping[str, Mapping[str, str]] = {
    TORCH: {
        "payload": "torch 2.2 and later record it always, earlier ones with profile(record_shapes=True)",
        "dtype": "torch 2.2 and later record it always, earlier ones with profile(record_shapes=True)",
        "size of the group": "torch 2.2 and later record it",
        "ranks of the group": "torch 2.4 and later record them in the header (pg_config)",
        "step": "call profiler.step() after every step",
        "phase": 'profile(with_stack=True), or record_function("forward") around it',
        "module": "profile(with_stack=True), but for calls of the backward pass, which runs in no module",
        "line": "profile(with_stack=True), but for calls that no Python function issued",
        "duration": "profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])",
        "reduce op": _NEVER,
    },
    FLIGHT_RECORDER: {
        "duration": "TORCH_NCCL_ENABLE_TIMING=1",
        "line": "TORCH_NCCL_TRACE_CPP_STACK=0 and TORCH_FR_BUFFER_SIZE above 0 record Python's stack",
    },
    NSYS: {"ranks of the group": "torch's profiler records them", "dtype": "torch's profiler records it"},
}
_BESIDE = "on gloo a dump of the Flight Recorder beside it does (shardproof record --profile torch writes both)"
_ON_GLOO: Mapping[str, str] = {
    **_OPTIONS[TORCH],
    **dict.fromkeys(("payload", "dtype", "size of the group", "ranks of the group"), _BESIDE),
    "duration": "gloo wrote no row of them",
}
_WHOLE_TRACE = "torch's profiler records it"


def sentences(traces: Sequence[Trace], world_size: int) -> list[str]:
    """What the traces do not know: a sentence a field, then ranks without a trace, and what came before the window."""
    found = []
    for format_ in dict.fromkeys(trace.format for trace in traces):
        calls = [call for trace in traces if trace.format == format_ for call in trace.calls]
        lacking = Counter(name for call in calls for name, lacks in _FIELDS.items() if lacks(call))
        on_gloo = format_ == TORCH and all(trace.backend == "gloo" for trace in traces)
        options = _ON_GLOO if on_gloo else _OPTIONS.get(format_, {})
        for name in _FIELDS:
            if number := lacking[name]:
                option = options.get(name, _NEVER if name == "reduce op" else _WHOLE_TRACE)
                found.append(f"unknown: the {name} of {_count_of(number, len(calls))}; {option}")
    if number := sum(len(trace.calls) for trace in traces):
        found.append(f"unknown: the micro-batch of {_count_of(number, number)}; {_NEVER}")
    ranks = {trace.rank for trace in traces}
    if absent := [rank for rank in range(world_size) if rank not in ranks]:
        of = f"rank{'s' if len(absent) > 1 else ''} {ranks_text(absent)} of {world_size}"
        found.append(f"unknown: all calls of {of}, which left no trace; start the profiler on every rank")
    for trace in traces:
        found += [f"unknown: {trace.lost} (rank {trace.rank})"] if trace.lost else []
        found += [f"{note} (rank {trace.rank})" for note in trace.notes]
    return found


def _count_of(number: int, of: int) -> str:
    if of == 1:
        return "the only call"
    return f"all {of} calls" if number == of else f"{number} of {of} calls"
