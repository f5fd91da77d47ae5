"""Decisions of the words of data parallelism, for the program and its closed form alike."""

from collections.abc import Iterable, Mapping

import torch

from shardproof.parallel.communication import expectation
from shardproof.parallel.data_parallel.buckets import Bucket, bucketed
from shardproof.parallel.data_parallel.calls import shard_axis
from shardproof.parallel.layers.roles import is_column, is_row
from shardproof.parallel.schedules.stages import TABLE, Stage
from shardproof.reference.case import Case
from shardproof.reference.model.parameters import dtype_of


def gradient_dtype(case: Case) -> torch.dtype:
    """The dtype in which gradients are added up and summed over ranks."""
    dtype: torch.dtype = getattr(torch, expectation.gradient_dtype(case))
    return dtype


def trained_dtype(case: Case) -> torch.dtype:
    """The dtype of what the optimizer steps."""
    return torch.float32 if case.master == "float32" else dtype_of(case)


def stage_buckets(case: Case, stage: Stage, sizes: Mapping[str, int], ranks: int) -> tuple[Bucket, ...]:
    """The buckets of a stage's parameters, given as name -> elements; each chunk of a rank has a buffer of its own.

    As in Megatron-Core `DistributedDataParallel`, `bucket=` cuts the first stage alone, for the sums of the others are
    hidden by its backward. A token table of two stages has a bucket of its own where buckets are shared, so that both
    stages cut it alike. Its copy comes last, as the head's weight.
    """
    names = sorted(sizes, key=lambda name: stage.copies_table and name == TABLE)
    return bucketed(
        {name: sizes[name] for name in names},
        ranks=ranks,
        sharded=case.zero == 1,
        largest=case.bucket if stage.first else 0,
        apart=(TABLE,) if stage.shares_table else (),
    )


def taken_over(case: Case, name: str) -> bool:
    """Does the buffer of gradients take over the products of this parameter's gradient? Of weights of linears."""
    module, _, leaf = name.rpartition(".")
    table = module == "head" or (case.tied and module == "embedding.tokens")
    return case.wgrad != "plain" and leaf == "weight" and (table or is_column(module) or is_row(module))


def units_of(case: Case, names: Iterable[str]) -> dict[str, list[str]]:
    """Parameters by the module that they are gathered with: their layer, or "", the model, outside of layers.

    Parameters that are sharded over other ranks than dense ones are gathered with the module of their linears, as
    torchtitan's experts are.
    """
    units = dict[str, list[str]]()
    for name in names:
        first, number, *_ = [*name.split("."), ""]
        module = f"{first}.{number}" if first == "layers" else ""
        own = shard_axis(case, name) != shard_axis(case)
        units.setdefault(name.rsplit(".", 2)[0] if own else module, []).append(name)
    return units
