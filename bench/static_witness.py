"""A second opinion on torchtitan's models: spmd_types, its own type checker of what ranks hold, beside our runs.

    python -m bench.static_witness "tp=2 dp=2 kind=qwen3"      in an environment with torchtitan

A rank of a group that sends nothing computes a micro-batch forward and backward. Types are those that torchtitan
states. Our verdict on the same case is that of `shardproof run CASE --subject
shardproof.suites.subjects.torchtitan:subject`. Exit status 1 where the checker finds a type wrong or missing.
"""

import importlib
import importlib.metadata
import sys
import warnings
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from shardproof.harness.subject import case_of, resolve_subject


def opinion(text: str) -> str:
    """The error of the type checker in this case of `suites.subjects.torchtitan`, "" when all has a type."""
    # In this order: the subject makes torchtitan take the CPU.
    titan: Any = importlib.import_module("shardproof.suites.subjects.torchtitan")
    annotated: Any = importlib.import_module("torchtitan.distributed.spmd_types").annotate_input_spmd_types

    def type_case(case: Any, model: Any, _dp_ranks: Any, dims: Any) -> dict[str, Any]:
        tokens = torch.randint(titan.VOCAB, (2, titan.LENGTH + 1))
        inputs, labels = tokens[:, :-1].clone(), tokens[:, 1:].clone()
        more = {"positions": torch.arange(titan.LENGTH).expand(2, -1)}
        loss_of = titan.CrossEntropyLoss.Config(global_vocab_size=titan.VOCAB).build()
        count = torch.tensor(labels.numel() * case.dp)
        with titan.utils.get_spmd_context(parallel_dims=dims, spmd_typechecking=True)():
            inputs, labels, more = annotated(dims, inputs, labels, more)
            loss, _ = loss_of(model(inputs, **more), labels, count, **more)
            loss.backward()
        return {}

    case = case_of(text, resolve_subject("shardproof.suites.subjects.torchtitan:subject"))
    dist.init_process_group("fake", rank=0, world_size=case.world_size)
    try:
        with titan.session(), mock.patch.object(titan, "train", type_case):
            titan.subject(case, torch.device("cpu"))
    except Exception as error:  # whatever the checker raises is its opinion
        return f"{type(error).__name__}: {error}"
    finally:
        dist.destroy_process_group()
    return ""


def main(text: str = "tp=2 dp=2") -> int:
    """Print the opinion on a case."""
    warnings.simplefilter("ignore")
    error = opinion(text)
    print(f"spmd_types {importlib.metadata.version('spmd_types')}, {text}: {error or 'typed'}")
    return int(bool(error))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
