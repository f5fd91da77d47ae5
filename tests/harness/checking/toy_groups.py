"""The dense model on four ranks that also talk over a mesh of the other rank order: tp strided, dp of neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from reference.case import Case
from reference.training import subject as dense

STRIDED = {"tp": ((0, 2), (1, 3)), "dp": ((0, 1), (2, 3))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Strided:
    """Sums over the dim of a DeviceMesh that it calls `dim`; `order` is what it says of its axes, None for nothing."""

    dim: str = "tp"
    order: Any = None

    def axes(self, case: Case) -> Any:
        """The rank lists of its axes."""
        return self.order

    def __call__(self, case: Case, device: torch.device) -> dict[str, Tensor]:
        """The dense model after one call; nothing on meta tensors."""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(self.dim, "dp"))
        dist.all_reduce(torch.ones(3, device=device), group=mesh[self.dim].get_group())
        return {} if device.type == "meta" else dense.subject(case, device)


unstated, stated, own_name = Strided(), Strided(order=STRIDED), Strided(dim="ring")
