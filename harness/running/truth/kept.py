"""What the dense model computed, kept from one case to the next."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

from torch import Tensor

from harness.protocols import CaseLike


class Truths:
    """What the dense model computed for the latest case, for the next trials of cases that are alike to it."""

    def __init__(self) -> None:
        self._case: CaseLike | None = None
        self._outcomes: dict[Hashable, Mapping[str, Tensor]] = {}

    def of(self, case: CaseLike, name: Hashable, compute: Callable[[], Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        """The outcome of this function of the reference for this case, computed unless it is known."""
        if case != self._case:  # what the case before left is freed before more is computed
            self._case, self._outcomes = case, {}
        if name not in self._outcomes:
            self._outcomes[name] = compute()
        return self._outcomes[name]
