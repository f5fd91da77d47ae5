"""Parameters of another system's checkpoint, read whole: what `folder.Stored` is for checkpoints of torch's format."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorProperties, TensorStorageMetadata

from parallel.communication.layout import Box


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Full tensors by key."""

    folder: Path
    held: Mapping[str, Tensor]

    @property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Shapes and dtypes."""
        return {
            key: TensorStorageMetadata(properties=TensorProperties(dtype=tensor.dtype), size=tensor.shape, chunks=[])
            for key, tensor in self.held.items()
        }

    def full(self, key: str) -> Tensor:
        """The full tensor of a key."""
        return self.held[key]

    def read(self, boxes: Sequence[tuple[str, Box]]) -> None:
        """Fill each box from the tensor of its key."""
        for key, box in boxes:
            at = tuple(slice(a, a + size) for a, size in zip(box.offsets, box.local.shape, strict=True))
            box.local.copy_(self.held[key][at])

    def chunks(self, key: str) -> list[tuple[tuple[tuple[int, ...], tuple[int, ...]], str]]:
        """((offsets, sizes), what wrote it): the whole tensor, by another system."""
        shape = tuple(self.held[key].shape)
        return [(((0,) * len(shape), shape), "another system")]
