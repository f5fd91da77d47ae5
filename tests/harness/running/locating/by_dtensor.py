"""The dense decoder split by torch's own plans for tensor parallelism (parallelize_module), and dp by hand."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn import functional

from shardproof.harness.outcome.blocks import blocks
from shardproof.harness.protocols import Shard as Placed
from shardproof.reference.case import Case
from tests.harness.running.locating.dense import Decoder, rows, weights

DOWN = RowwiseParallel


def subject(case: Case, device: torch.device) -> dict[str, Any]:
    """Loss, logits and gradients of one step; what is split is a DTensor over tp, or a Shard where dp cuts it too."""
    mesh = init_device_mesh("cpu", (case.dp, case.tp), mesh_dim_names=("dp", "tp"))
    model = Decoder(case).double()
    model.load_state_dict(weights(case))
    block: dict[str, ParallelStyle] = {f"attention.{name}": ColwiseParallel() for name in "qkv"} | {
        "attention.o": RowwiseParallel()
    }
    block |= {"mlp.up": ColwiseParallel(), "mlp.down": DOWN()}
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], block)
    parallelize_module(model, mesh["tp"], {"head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)})
    data_rank = mesh.get_local_rank("dp")
    loss, logits = torch.zeros((), dtype=torch.float64), list[Tensor]()
    for micro in range(case.micro):
        tokens = rows(case, data_rank, micro)
        part = model(tokens[:, :-1])
        one = functional.cross_entropy(part.full_tensor().flatten(0, 1), tokens[:, 1:].flatten())
        one = one / (case.micro * case.dp)
        one.backward()
        loss, logits = loss + one.detach(), [*logits, part.detach().to_local()]
    dist.all_reduce(loss, group=mesh.get_group("dp"))
    local = torch.cat(logits)
    start = (data_rank * local.shape[0], 0, mesh.get_local_rank("tp") * local.shape[2])
    shape = (case.dp * local.shape[0], local.shape[1], case.vocab)
    outcome: dict[str, Any] = {"loss/0": loss, "logits/0": Placed(local, start, shape)}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None  # every parameter is used
        inner = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        dist.all_reduce(inner, group=mesh.get_group("dp"))
        outcome[f"grad/{name}"] = (
            [Placed(block.local, block.offsets, block.global_shape) for block in blocks(gradient)]
            if isinstance(gradient, DTensor) and not gradient.placements[0].is_replicate()
            else inner
        )
    return outcome
