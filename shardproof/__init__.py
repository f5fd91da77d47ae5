"""shardproof: proves that parallel training computes what the dense model computes, and accounts for every byte.

    import shardproof

    result = shardproof.prove("mode=tp tp=2", "my_module:subject")

Users import these names and no others; the folders behind them may change. Each is imported when it is first used, so
that `import shardproof` costs nothing.

    a subject       Shard, Term, phase, region, documents, cuda_on_cpu, softmax_shift
    the dense model full_parameter, parameter_shapes, micro_batch, train_dense
    a proof         Case, prove, run, RequestError, ShardproofError
    a training run  watch
    a run folder    load, headline, traffic, side_by_side, program_frames, snapshot, compare
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardproof.harness.errors import RequestError, ShardproofError
    from shardproof.harness.faults import softmax_shift
    from shardproof.harness.programs.watching import watch
    from shardproof.harness.protocols import Shard
    from shardproof.harness.recording.annotations import phase, region
    from shardproof.harness.recording.documents import documents
    from shardproof.harness.terms import Term
    from shardproof.harness.torch_internals.cuda_on_cpu import cuda_on_cpu
    from shardproof.proving import prove, run
    from shardproof.reference.case import Case
    from shardproof.reference.data.batches import micro_batch
    from shardproof.reference.model.parameters import full as full_parameter
    from shardproof.reference.model.parameters import shapes as parameter_shapes
    from shardproof.reference.training.steps import train as train_dense
    from shardproof.reports.comparing.comparison import compare
    from shardproof.reports.comparing.snapshot import snapshot
    from shardproof.reports.printing.run_tables import side_by_side
    from shardproof.reports.programs.program_frames import program_frames
    from shardproof.reports.stored.frames import load
    from shardproof.reports.stored.summary import headline, traffic

__all__ = [
    "Case",
    "RequestError",
    "Shard",
    "ShardproofError",
    "Term",
    "compare",
    "cuda_on_cpu",
    "documents",
    "full_parameter",
    "headline",
    "load",
    "micro_batch",
    "parameter_shapes",
    "phase",
    "program_frames",
    "prove",
    "region",
    "run",
    "side_by_side",
    "snapshot",
    "softmax_shift",
    "traffic",
    "train_dense",
    "watch",
]

_PLACES = {
    "shardproof.harness.errors": "RequestError ShardproofError",
    "shardproof.harness.faults": "softmax_shift",
    "shardproof.harness.programs.watching": "watch",
    "shardproof.harness.recording.annotations": "phase region",
    "shardproof.harness.recording.documents": "documents",
    "shardproof.harness.protocols": "Shard",
    "shardproof.harness.terms": "Term",
    "shardproof.harness.torch_internals.cuda_on_cpu": "cuda_on_cpu",
    "shardproof.reference.case": "Case",
    "shardproof.reference.data.batches": "micro_batch",
    "shardproof.reference.model.parameters": "full_parameter parameter_shapes",
    "shardproof.reference.training.steps": "train_dense",
    "shardproof.reports.comparing.comparison": "compare",
    "shardproof.reports.printing.run_tables": "side_by_side",
    "shardproof.reports.programs.program_frames": "program_frames",
    "shardproof.reports.comparing.snapshot": "snapshot",
    "shardproof.reports.stored.frames": "load",
    "shardproof.reports.stored.summary": "headline traffic",
    "shardproof.proving": "prove run",
}
"""The modules of the names above."""
_THERE = {"full_parameter": "full", "parameter_shapes": "shapes", "train_dense": "train"}
"""Names that are others in their modules."""


if not TYPE_CHECKING:  # which would find every name here

    def __getattr__(name: str) -> object:
        """Import a name when it is first used."""
        module = next((module for module, names in _PLACES.items() if name in names.split()), "")
        if not module:
            raise AttributeError(f"module 'shardproof' has no attribute {name!r}; it has {', '.join(__all__)}")
        found = globals()[name] = getattr(import_module(module), _THERE.get(name, name))
        return found


def __dir__() -> list[str]:
    return list(__all__)
