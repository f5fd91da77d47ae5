"""The dense model as one object: its case language, what it reads of a case, and what it computes.

The harness proves against this object and imports nothing else of `reference` (`harness.dense_model` states its type).
Words need no torch, so that a wrong one is refused at once; the modules that compute are imported on first use.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardproof.reference.case import Case
from shardproof.reference.case.default_cases import default_cases, plain_cases
from shardproof.reference.case.domains import domains
from shardproof.reference.case.variants import words
from shardproof.reference.data.files import status
from shardproof.reference.language.core import MODES


class DenseModel:
    """The dense decoder, as the harness sees it."""

    case = Case

    @property
    def modes(self) -> tuple[str, ...]:
        """The names of all modes."""
        return tuple(MODES)

    def domains(self) -> dict[str, tuple[Any, ...]]:
        """Word -> the values that stand for all that it can have, the plainest first."""
        return domains()

    def default_cases(
        self, modes: Sequence[str], refuses: Callable[[Case], str], *, deep: bool, checkpoint: str
    ) -> tuple[Case, ...]:
        """The cases that run when none is given."""
        return default_cases(modes, refuses, deep=deep, checkpoint=checkpoint)

    def plain_cases(self, mode: str) -> tuple[Case, ...]:
        """Cases of a mode without words that few implementations know."""
        return plain_cases(mode)

    def variant_words(self, name: str) -> Mapping[str, Any]:
        """The words with which a case shows a variant. Raises ValueError for an unknown name."""
        return words(name)

    def find_data(self, path: Path) -> None:
        """Raise ValueError or RuntimeError if there is no file or folder of data there."""
        status(path)

    def __getattr__(self, name: str) -> Any:
        """A function of `computing`, which loads torch on first use."""
        from shardproof.reference.dense_model import computing  # noqa: PLC0415  (loads torch)

        return getattr(computing, name)


DENSE_MODEL = DenseModel()
