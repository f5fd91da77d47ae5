"""The dense model as the harness knows it: one object with these methods, found by its name as a subject is.

The dense model stands for no mathematics here: the harness imports neither the reference nor any implementation.
Outcomes are full tensors by name; functions of (case, device) take what they cannot know as given=mapping.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, cast

from harness.protocols import FactsLike
from harness.resolve import resolve

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Outcome: TypeAlias = "Mapping[str, Tensor]"
NAME = "reference.dense_model:DENSE_MODEL"
SUBJECT = "parallel.subject:subject"
"""The implementation under test where no other is named."""


class WhatIfLike(Protocol):
    """A rule of the dense model that may not be kept.

    `words` go on from "what the dense model computes". `explains` are the kinds of wrong tensors for which it is
    tried; `names_readings`: whether a cause names the readings that fit.
    """

    @property
    def id(self) -> str: ...
    @property
    def words(self) -> str: ...
    @property
    def explains(self) -> frozenset[str]: ...
    @property
    def names_readings(self) -> bool: ...
    def readings(self, case: Any, device: torch.device, **words: Any) -> Mapping[str, Outcome]:
        """Every way to break the rule -> what is computed then, by name; {} where it makes no difference."""
        ...


class Tried(NamedTuple):
    """A rule that was tried in a case, and what is computed by each reading of it, by name."""

    rule: WhatIfLike
    readings: Mapping[str, Outcome]


class DenseModelLike(Protocol):
    """Words of a case, and what is computed of it. A case here is one that `case` has read."""

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
    def data_facts(self, case: Any) -> FactsLike: ...
    def sizes(self, case: Any, *, shapes_alone: bool) -> Mapping[str, int]: ...
    def too_large(self, case: Any, limit: int) -> tuple[str, int] | None: ...
    def alike(self, case: Any) -> Any: ...
    def given_kinds(self, case: Any) -> tuple[str, ...]: ...
    def self_contained(self, case: Any) -> Any: ...
    def initial_deviations(self, case: Any) -> Mapping[str, float]: ...
    def truth(self, case: Any, device: torch.device, **words: Any) -> Outcome: ...
    def control(self, case: Any, device: torch.device, **words: Any) -> Outcome: ...
    def kinks(self, case: Any, device: torch.device, **words: Any) -> Outcome: ...
    def adam_slack(self, case: Any, states: Outcome, truth: Outcome, controls: Sequence[Outcome]) -> Outcome: ...
    def shares(self, case: Any, device: torch.device, **words: Any) -> Outcome: ...
    def what_ifs(self) -> Sequence[WhatIfLike]: ...


def dense_model() -> DenseModelLike:
    """The dense model of every case that is not in words of a subject's own."""
    return cast(DenseModelLike, resolve(NAME))
