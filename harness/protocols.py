"""Types that the harness needs of a case, a subject, a shard and an expectation: protocols, so no subject imports us.

Third parties and our own `parallel` satisfy these by structure. Shard alone is no protocol: it is a rank's block of a
full tensor, as a subject returns it. Users import it from `shardproof`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Axes = Mapping[str, tuple[tuple[int, ...], ...]]
"""Mesh axis -> the rank lists of its groups."""


class CaseLike(Protocol):
    """An experiment; `str(case)` is its one-line text, which parses back to an equal case."""

    @property
    def mode(self) -> str: ...
    @property
    def world_size(self) -> int: ...
    @property
    def axes(self) -> Axes:
        """Mesh axis -> the rank lists of its groups."""
        ...

    @property
    def steps(self) -> int: ...
    @property
    def micro(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def seed(self) -> int: ...
    def but(self, **words: Any) -> "CaseLike":
        """This case with some words changed."""
        ...


class ShardLike(Protocol):
    """Block of a full tensor on one rank: `full[offsets : offsets + local.shape] == local`."""

    @property
    def local(self) -> "Tensor": ...
    @property
    def offsets(self) -> tuple[int, ...]: ...
    @property
    def global_shape(self) -> tuple[int, ...]: ...


Value: TypeAlias = "Tensor | ShardLike | Iterable[ShardLike]"
"""Value of a subject under one name: a full tensor, one shard, several shards (a fused weight), or a DTensor. A number
or an array of numpy is a full tensor too."""


class TermLike(Protocol):
    """Line of a closed form: `calls` equal events that every rank must issue over the whole run.

    A term may have `hidden`: True promises that a product is computed between the issue and the wait of each call. Only
    a `harness.terms.Term` may leave fields out, which are None there.
    """

    @property
    def phase(self) -> str | None: ...
    @property
    def region(self) -> str | None: ...
    @property
    def op(self) -> str | None: ...
    @property
    def reduce_op(self) -> str | None: ...
    @property
    def axis(self) -> str | None: ...
    @property
    def group_size(self) -> int | None: ...
    @property
    def dtype(self) -> str | None: ...
    @property
    def payload_bytes(self) -> int | None: ...
    @property
    def calls(self) -> int | None: ...


class ActionLike(Protocol):
    """A computation of a stage ("F" forward, "B" backward, "W" weight gradient alone), or a message: any other kind."""

    @property
    def kind(self) -> str: ...
    @property
    def micro(self) -> int: ...
    @property
    def chunk(self) -> int: ...


class PipelineLike(Protocol):
    """The pipeline of a case: what each stage does in a step."""

    @property
    def layers(self) -> Sequence[int]:
        """The layers of every stage, over all its chunks."""
        ...

    @property
    def chunks(self) -> int:
        """The chunks of layers of every stage."""
        ...

    @property
    def alike(self) -> Sequence[int]:
        """Stage -> the first stage with as many layers and the same ends of the model."""
        ...

    @property
    def programs(self) -> Sequence[Sequence[Sequence[ActionLike]]]:
        """For every stage, its program of a step: computations, and the messages of one batch, one after the other."""
        ...

    @property
    def bubble_stated(self) -> float | None:
        """The share of time in which stages wait, in closed form; None if none is known."""
        ...

    def sample(self, depth: int | None) -> CaseLike:
        """A step of few micro-batches, three if the case has as many; with `depth` layers in every chunk."""
        ...


class Subject(Protocol):
    """The implementation under test, called on every rank with torch.distributed initialised.

    Optional attributes, looked up with getattr (harness.subject has further ones):
        modes        tuple of mode names it claims; other cases are skipped with that reason
        refuses      case -> reason why this case is not supported, "" when it is
        expected     case -> iterable of terms (the closed form), or None
        unchecked    tuple of patterns of names that it leaves out on purpose, such as "grad/*.bias"
        activations  (case, rank, module, local tensor) -> shard of `act/<module>`, or None when it is not comparable
        axes         case -> axis: rank lists of its groups, for axes whose rank order is not the case's
        deviations   case -> standard deviations of initial values by parameter, 0 for a constant
        compute_dtype, wire_dtype  dtype lower than the case's, or case -> dtype: of matrix products, of what is sent;
                     wire_dtype may map calls to dtypes ("all_gather over dp")
        deviates     pattern of names -> sentence, or case -> such a mapping: tensors that deviate from the truth by
                     design, and how
        per_rank     tuple of names of modules whose globals, class attributes and singletons every rank has for itself
        harmless     (case, harness.faults.Fault) -> why this fault of a collective changes nothing that is computed,
                     "" when it does: a proof in words, listed in the kill matrix
        pipeline     case with pp above 1 -> PipelineLike; without it `predict` refuses several pipeline stages
    """

    def __call__(self, case: Any, device: "torch.device") -> Mapping[str, Value]: ...


def without_saving(case: CaseLike) -> dict[str, Any]:
    """Words with which another run of a case leaves the checkpoint of this one untouched; empty if it saves none."""
    nothing = getattr(case, "defaults", {}).get("save", "")
    return {"save": nothing} if getattr(case, "save", nothing) != nothing else {}


def case_text(case: CaseLike) -> str:
    """The case's one line; never empty, so that it can stand in a table and after `shardproof run`."""
    return str(case) or f"mode={case.mode}"


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
