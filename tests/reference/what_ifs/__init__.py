"""What-ifs of the dense model."""

from typing import Any

import torch
from torch import Tensor

from reference.case import Case
from reference.what_ifs.rules import what_ifs

_CPU = torch.device("cpu")


def broken(case: Case, *ids: str, **given: Any) -> dict[str, Tensor]:
    """Tensors when these rules are not kept, all by default: "<id>.<reading>/<name>" -> tensor."""
    return {
        f"{rule.id}{'.' * bool(reading)}{reading}/{name}": tensor
        for rule in what_ifs()
        if not ids or rule.id in ids
        for reading, tensors in rule.readings(case, _CPU, **given).items()
        for name, tensor in tensors.items()
    }
