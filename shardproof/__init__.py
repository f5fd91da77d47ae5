"""shardproof: proves that parallel training computes what the dense model computes, and accounts for every byte.

    import shardproof

    result = shardproof.prove("mode=tp tp=2", "my_module:subject")

Users import these names and no others; the folders behind them may change. Each is imported when it is first used, so
that `import shardproof` costs nothing.

    a subject       Shard, Term, phase, region, cuda_on_cpu, softmax_shift
    the dense model full_parameter, parameter_shapes, micro_batch, train_dense
    a proof         Case, prove, run, RequestError, ShardproofError
    a training run  watch
    a run folder    load, headline, traffic, side_by_side, snapshot, compare
"""

from typing import TYPE_CHECKING

from shardproof.rooms import lead

if TYPE_CHECKING:
    from harness.errors import RequestError, ShardproofError
    from harness.faults import softmax_shift
    from harness.programs.watching import watch
    from harness.recording.annotations import phase, region
    from harness.shard import Shard
    from harness.terms import Term
    from harness.torch_internals.cuda_on_cpu import cuda_on_cpu
    from reference.case import Case
    from reference.data.batches import micro_batch
    from reference.model.parameters import full as full_parameter
    from reference.model.parameters import shapes as parameter_shapes
    from reference.training.steps import train as train_dense
    from reports.comparing.comparison import compare
    from reports.comparing.modes import side_by_side
    from reports.comparing.snapshot import snapshot
    from reports.stored.frames import load
    from reports.stored.summary import headline, traffic
    from shardproof.proving import prove, run

__all__ = [
    "Case",
    "RequestError",
    "Shard",
    "ShardproofError",
    "Term",
    "compare",
    "cuda_on_cpu",
    "full_parameter",
    "headline",
    "load",
    "micro_batch",
    "parameter_shapes",
    "phase",
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

_NEEDED = (
    (("harness",), "RequestError Shard ShardproofError Term cuda_on_cpu phase region softmax_shift watch"),
    (("reference",), "Case full_parameter micro_batch parameter_shapes train_dense"),
    (("reports", "harness"), "compare headline load side_by_side snapshot traffic"),
    (("harness", "reference", "parallel"), "prove run"),
)
"""The rooms that names are in, or import."""


if not TYPE_CHECKING:  # which would find every name here

    def __getattr__(name: str) -> object:  # noqa: PLR0912, PLR0915  (a name each)
        """Import a name when it is first used. Raises ImportError where another package is in the place of ours."""
        for rooms, names in _NEEDED:
            if name in names.split():
                lead(*rooms)
        match name:
            case "Case":
                from reference.case import Case as found
            case "RequestError":
                from harness.errors import RequestError as found
            case "Shard":
                from harness.shard import Shard as found
            case "ShardproofError":
                from harness.errors import ShardproofError as found
            case "Term":
                from harness.terms import Term as found
            case "compare":
                from reports.comparing.comparison import compare as found
            case "cuda_on_cpu":
                from harness.torch_internals.cuda_on_cpu import cuda_on_cpu as found
            case "full_parameter":
                from reference.model.parameters import full as found
            case "headline":
                from reports.stored.summary import headline as found
            case "load":
                from reports.stored.frames import load as found
            case "micro_batch":
                from reference.data.batches import micro_batch as found
            case "parameter_shapes":
                from reference.model.parameters import shapes as found
            case "phase":
                from harness.recording.annotations import phase as found
            case "prove":
                from shardproof.proving import prove as found
            case "region":
                from harness.recording.annotations import region as found
            case "run":
                from shardproof.proving import run as found
            case "side_by_side":
                from reports.comparing.modes import side_by_side as found
            case "snapshot":
                from reports.comparing.snapshot import snapshot as found
            case "softmax_shift":
                from harness.faults import softmax_shift as found
            case "traffic":
                from reports.stored.summary import traffic as found
            case "train_dense":
                from reference.training.steps import train as found
            case "watch":
                from harness.programs.watching import watch as found
            case _:
                raise AttributeError(f"module 'shardproof' has no attribute {name!r}; it has {', '.join(__all__)}")
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return list(__all__)
