"""Groups and works that stand for torch's: the private names that they answer to, and tensors under way."""

from typing import TypeVar

from torch import Tensor
from torch.distributed import _functional_collectives
from torch.distributed._functional_collectives import AsyncCollectiveTensor

_Class = TypeVar("_Class", bound=type)
_PRIVATE_NAMES = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "start_coalescing": "_start_coalescing",
    "end_coalescing": "_end_coalescing",
    "source_rank": "_source_rank",
    "get_backend": "_get_backend",
    "device_types": "_device_types",
    "has_hooks": "_has_hooks",
}
"""Method or property -> the name under which torch calls it too: the flat ones up to 2.12, the others always."""


def answers_torch(kind: _Class) -> _Class:
    """A class decorator: methods of a group or a work also under the private names by which torch calls them."""
    for name, private in _PRIVATE_NAMES.items():
        if name in vars(kind):
            setattr(kind, private, vars(kind)[name])
    return kind


Pending = AsyncCollectiveTensor
"""The result of a functional collective under way. torch.distributed._functional_collectives.AsyncCollectiveTensor."""


FUNCTIONAL = _functional_collectives.__file__
"""The file of torch's functions of functional collectives, which hand out such results."""


def waited(tensor: Tensor) -> Tensor:
    """The tensor; of a functional collective under way its result, waited for."""
    return tensor.trigger_wait() if isinstance(tensor, Pending) else tensor
