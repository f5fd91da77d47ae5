"""A shard: one rank's block of a full tensor, as a subject returns it. Users import it from `shardproof`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shard:
    """Block of a full tensor on one rank: `full[offsets : offsets + local.shape] == local`.

    Raises ValueError when the block does not lie inside `global_shape`.
    """

    local: "Tensor"
    offsets: tuple[int, ...]
    global_shape: tuple[int, ...]

    def __post_init__(self) -> None:
        check_inside(tuple(self.local.shape), tuple(self.offsets), tuple(self.global_shape))


def check_inside(local: tuple[int, ...], offsets: tuple[int, ...], full: tuple[int, ...]) -> None:
    """Raise ValueError unless a block of shape `local` at these offsets lies inside a tensor of shape `full`."""
    if not len(local) == len(offsets) == len(full):
        raise ValueError(
            f"offsets={offsets} and global_shape={full} must have as many entries as local.shape={local} has dims; "
            f"legal: offsets={(0,) * len(local)}, global_shape={local}"
        )
    for n, o, size in zip(local, offsets, full, strict=True):
        if o < 0 or o + n > size:
            raise ValueError(
                f"offsets={offsets} with local.shape={local} must lie inside global_shape={full}; "
                f"legal: offsets={tuple(max(0, s - n) for n, s in zip(local, full, strict=True))}"
            )
