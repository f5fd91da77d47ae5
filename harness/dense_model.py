"""The dense model as the harness knows it: one object with the methods of DenseModelLike, found by name like a subject.

The harness imports neither the reference nor any implementation. Outcomes are full tensors by name; functions of (case,
device) take what an implementation draws as given=mapping. The words of cases are read here without loading torch, so
that the command line refuses a wrong word at once.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeGuard, cast

from shardproof.harness.errors import RequestError
from shardproof.harness.protocols import CaseLike
from shardproof.harness.resolve import resolve

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from shardproof.harness.plain_case import PlainCase

Outcome: TypeAlias = "Mapping[str, Tensor]"
NAME = "shardproof.reference.dense_model:DENSE_MODEL"
SUBJECT = "shardproof.parallel.subject:subject"
"""The implementation under test, if no other is named."""


class DenseModelLike(Protocol):
    """The words of a case, and what is computed of it. A case here is one that `case` has read."""

    @property
    def case(self) -> Any:
        """The class of cases: `parse(text)`, `check_words(text)`, `meanings()`."""
        ...

    @property
    def modes(self) -> tuple[str, ...]: ...
    def domains(self) -> Mapping[str, tuple[Any, ...]]: ...
    def default_cases(
        self, modes: Sequence[str], refuses: Callable[[Any], str], *, deep: bool, checkpoint: str
    ) -> tuple[Any, ...]: ...
    def plain_cases(self, mode: str) -> tuple[Any, ...]: ...
    def variant_words(self, name: str) -> Mapping[str, Any]: ...
    def find_data(self, path: Path) -> None: ...
    def read_data(self, case: Any) -> None: ...
    def unread_rows(self, case: Any) -> tuple[str, ...]: ...
    def sizes(self, case: Any, *, shapes_alone: bool) -> Mapping[str, int]: ...
    def too_large(self, case: Any, limit: int) -> tuple[str, int] | None: ...
    def alike(self, case: Any) -> Any: ...
    def list_given_kinds(self, case: Any) -> tuple[str, ...]: ...
    def self_contained(self, case: Any) -> Any: ...
    def initial(self, case: Any, device: "torch.device", **words: Any) -> Outcome: ...
    def initial_deviations(self, case: Any) -> Mapping[str, float]: ...
    def truth(self, case: Any, device: "torch.device", **words: Any) -> Outcome: ...
    def control(self, case: Any, device: "torch.device", **words: Any) -> Outcome: ...
    def measure_relu_flips(self, case: Any, device: "torch.device", **words: Any) -> Outcome: ...
    def bound_adam(self, case: Any, states: Outcome, truth: Outcome, controls: Sequence[Outcome]) -> Outcome: ...
    def shares(self, case: Any, device: "torch.device", **words: Any) -> Outcome: ...


def dense_model() -> DenseModelLike:
    """The dense model of every case, unless the case is in words of a subject's own."""
    return cast(DenseModelLike, resolve(NAME))


def read_case(text: str) -> Any:
    """The case of this text (a `harness.protocols.CaseLike`). Raises RequestError for any other text."""
    try:
        return dense_model().case.parse(text)
    except ValueError as problem:
        raise RequestError(f"case {text!r}: {problem}") from problem


def parse_cases(texts: Iterable[str]) -> tuple[Any, ...]:
    """The cases of these texts, without repeats. Raises RequestError for the first text that is no case."""
    return tuple({str(case): case for case in map(read_case, texts)}.values())


def check_words(text: str) -> None:
    """Raise RequestError for a word of the text that no case has, or whose value cannot be read."""
    try:
        dense_model().case.check_words(text)
    except ValueError as problem:
        raise RequestError(f"case {text!r}: {problem}") from problem


def check_modes(text: str) -> None:
    """Raise RequestError unless an option chooses "all" modes, or modes that a case can have, separated by commas."""
    known = dense_model().modes
    unknown = [mode for mode in text.split(",") if mode not in known]
    if text != "all" and unknown:
        raise RequestError(
            f"modes={','.join(unknown)}: no case has this mode; legal: all, or some of {','.join(known)}"
        )


def in_own_words(case: CaseLike) -> "TypeGuard[PlainCase]":
    """Whether a case is in words of a subject's own, of which our dense model knows nothing."""
    return hasattr(type(case), "vocabulary")
