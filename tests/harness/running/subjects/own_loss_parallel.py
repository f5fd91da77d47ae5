"""A subject whose ranks enter torch's loss_parallel themselves: the first to leave it ends it for all threads."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel


class _Subject:
    words: Any = {"micro": 1}
    cases: Any = ("tp=2",)
    truth = "alone"

    def __call__(self, case: Any, device: torch.device) -> dict[str, torch.Tensor]:
        """The cross entropy of logits that are sharded over the classes, and their gradient."""
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        logits = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        sharded = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
        with loss_parallel():
            loss: Any = torch.nn.functional.cross_entropy(sharded, torch.tensor([1, 2, 3, 4]))
            loss.backward()
        gradient: Any = sharded.grad
        return {"loss/0": loss.full_tensor() if isinstance(loss, DTensor) else loss, "grad/logits": gradient}


subject = _Subject()
