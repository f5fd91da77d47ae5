"""Counts and calls of Megatron-LM itself beside a case's closed form: its estimate of memory, and its step's calls.

Its step all-reduces over groups of one rank too, and looks for infinite gradients in float16. All ranks of the model
agree on whether the update took place and on the norm that is logged. None of that changes a number, so ours leaves it
out. Sources: Megatron-Core 0.14 `finalize_model_grads`, `MixedPrecisionOptimizer`, `training.train_step` (modes.md 5,
measured). Megatron-LM `theoretical_memory_usage.py` counts neither biases nor positions.
"""

import math
from collections.abc import Iterable, Iterator, Mapping

from shardproof.parallel.communication.expectation import CompleteTerm, gradient_dtype
from shardproof.parallel.communication.layout import Placement, local_shape
from shardproof.parallel.communication.mesh import axis_size, coordinates
from shardproof.reference.case import Case
from shardproof.reference.model.parameters import shapes

Line = tuple[str, str]
_MB = 2**20
_STATES, _SPLIT_STATES = (18.0, 0.0), (6.0, 12.0)
"""Bytes of a parameter kept by every data rank, and those that data ranks share."""


def megatron_beside(case: Case, places: Mapping[str, Placement]) -> Iterator[Line]:
    """(what, how much) of a case of tp or tp-sp; `places` are those of its parameters."""
    padding = {"embedding.tokens.weight", "head.weight"}
    whole = sum(
        math.prod((case.padded_vocab, *shape[1:]) if name in padding else shape) for name, shape in shapes(case).items()
    )
    yield "parameters of a rank", f"{local_elements(case, places):,}"
    yield "parameters of the model", f"{whole:,}"
    if len(case.blocks) == case.layers and not case.replaced_branches(0):  # it knows plain layers alone
        yield "weights and optimizer of a rank by Megatron-LM's own estimate", f"{estimated_mb(case):,.2f} MB"
    for what, op, elements, dtype, group in step_calls(case, local_elements(case, places)):
        width = 2 if dtype in ("float16", "bfloat16") else 8 if dtype == "float64" else 4
        yield f"Megatron's step: {what}", f"{op} of {elements * width:,} B {dtype} over {group}"


def local_elements(case: Case, places: Mapping[str, Placement]) -> int:
    """Elements of all parameters on one rank, padding included."""
    return sum(math.prod(local_shape(place, coordinates(case, 0))) for place in places.values())


def ledger_lines(case: Case, terms: Iterable[CompleteTerm]) -> Iterator[Line]:
    """(phase, calls and payload of a rank) of a closed form: in every micro-batch, and once a step."""
    counted: dict[tuple[str, str], list[int]] = {}
    for term in terms:
        often, per = (case.micro, "micro-batch") if term.calls % (case.steps * case.micro) == 0 else (1, "step")
        if term.phase in ("grad_sync", "step"):
            often, per = 1, "step"
        calls = term.calls // (case.steps * often)
        line = counted.setdefault((f"our ledger, a {per}: {term.phase}", term.op), [0, 0])
        line[0], line[1] = line[0] + calls, line[1] + calls * term.payload_bytes
    for (what, op), (calls, size) in counted.items():
        yield what, f"{calls} {op} of {size:,} B together"


def estimated_mb(case: Case) -> float:
    """Megatron-LM's theoretical memory of weights and optimizer on a rank, in units of 2**20 bytes."""
    hidden, gated = case.hidden, 1.5 if case.activation == "swiglu" else 1.0
    layer = 2 * hidden**2 * (1 + case.kv_heads / case.heads) + 2 * hidden * case.ffn * gated + 4 * hidden
    tables = hidden * case.padded_vocab * (1 if case.tied else 2)
    kept, shared = _SPLIT_STATES if case.zero else _STATES
    return (case.layers * layer + 2 * hidden + tables) / case.tp * (kept + shared / case.dp) / _MB


def step_calls(case: Case, elements: int) -> Iterator[tuple[str, str, int, str, str]]:
    """(what, op, elements, dtype, group) of each call that Megatron's step issues once and ours does not."""
    model, data = f"{case.tp} ranks of tp", "a group of one"
    if axis_size(case, case.token_axis) == 1:
        yield "gradients", "all_reduce", elements, gradient_dtype(case), data
        yield "loss and number of tokens", "all_reduce", 2, "float32", data
    if case.dtype == "float16" and case.scaler == "none":
        yield "infinite gradients", "all_reduce", 1, "float32", model
    yield "whether all updated", "all_reduce", 1, "int32", model
    yield "the norm that is logged", "all_reduce", 1, "float32", model
    yield "whether a step is run again", "all_reduce", 1, "float32", f"all {case.world_size} ranks"
