"""The dense model as one object: its case language, what it reads of a case, what it computes of one.

The harness proves against this object and sees no other part of `reference` (`harness.dense_model` states its type).
Each method imports what it needs: words need no torch, and a case that passes needs nothing of what explains failures.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardproof.reference.case import Case
from shardproof.reference.case.default_cases import default_cases, plain_cases
from shardproof.reference.case.domains import domains
from shardproof.reference.case.variants import words
from shardproof.reference.data.files import status
from shardproof.reference.language.core import MODES

if TYPE_CHECKING:
    import torch
    from torch import Tensor


Outcome = Mapping[str, "Tensor"]


class DenseModel:
    """The decoder. Outcomes are full tensors by name."""

    case = Case

    @property
    def modes(self) -> tuple[str, ...]:
        """The names of all modes."""
        return tuple(MODES)

    def domains(self) -> dict[str, tuple[Any, ...]]:
        """Every word that has several values, with these, the plainest first."""
        return domains()

    def default_cases(
        self, modes: Sequence[str], refuses: Callable[[Case], str], *, deep: bool, checkpoint: str
    ) -> tuple[Case, ...]:
        """The cases that run when none is given."""
        return default_cases(modes, refuses, deep=deep, checkpoint=checkpoint)

    def plain_cases(self, mode: str) -> tuple[Case, ...]:
        """Cases of a mode with no word that an implementation must have been written for."""
        return plain_cases(mode)

    def variant_words(self, name: str) -> Mapping[str, Any]:
        """The words that make a case show a variant. Raises ValueError for an unknown name."""
        return words(name)

    def find_data(self, path: Path) -> None:
        """Raise ValueError or RuntimeError when there is no file or folder of data there."""
        status(path)

    def read_data(self, case: Case) -> None:
        """Read a first micro-batch. Raises ValueError or OSError when the data cannot be read."""
        from shardproof.reference.data.batches import micro_batch

        micro_batch(case, 0, 0, 0)

    def unread_rows(self, case: Case) -> tuple[str, ...]:
        """Rows of tables that the data of the case never look up, in words; () where they look up all."""
        from shardproof.reference.data.batches import unread_rows

        return unread_rows(case)

    def sizes(self, case: Case, *, shapes_alone: bool) -> Mapping[str, int]:
        """Elements of the dense model and its data by what they are; of a micro-batch for ranks without numbers."""
        from shardproof.reference.training.size import first_batch, sizes_by_part

        return first_batch(case) if shapes_alone else sizes_by_part(case)

    def too_large(self, case: Case, limit: int) -> tuple[str, int] | None:
        """The word without which the case has at most `limit` elements, and its usual value; None for no single one."""
        from shardproof.reference.training.size import word_of_size

        return word_of_size(case, limit)

    def alike(self, case: Case) -> Case:
        """The case that stands for all that are one case to the dense model."""
        from shardproof.reference.training.truth import dense_case

        return dense_case(case)

    def list_given_kinds(self, case: Case) -> tuple[str, ...]:
        """The kinds of names of an outcome that the dense model cannot know and takes as given=mapping."""
        from shardproof.reference.training.truth import list_given_kinds

        return list_given_kinds(case)

    def self_contained(self, case: Case) -> Case:
        """A case with equal names whose dense model needs nothing given."""
        from shardproof.reference.training.truth import without_draws

        return without_draws(case)

    def initial(self, case: Case, device: "torch.device", **words: Any) -> Outcome:
        """The value of every parameter before the first step, to be read only."""
        from shardproof.reference.model.parameters import weights
        from shardproof.reference.model.randomness import takes_given

        return takes_given(weights)(case, device, **words)

    def initial_deviations(self, case: Case) -> Mapping[str, float]:
        """The standard deviation of initial values by parameter."""
        from shardproof.reference.training.truth import initial_deviations

        return initial_deviations(case)

    def truth(self, case: Case, device: "torch.device", **words: Any) -> Outcome:
        """The outcome in float64, and the activations; `states`: where every step begins."""
        from shardproof.reference.training.truth import truth

        return truth(case, device, **words)

    def control(self, case: Case, device: "torch.device", **words: Any) -> Outcome:
        """Outcome in the dtype of the case with every sum in another order; `parts`: of how many partial sums."""
        from shardproof.reference.training.control import control

        return control(case, device, **words)

    def measure_relu_flips(self, case: Case, device: "torch.device", **words: Any) -> Outcome:
        """The change of the outcome where rounding decides the side of a relu's kink; `side` is 1 or -1."""
        from shardproof.reference.training.control import measure_relu_flips

        return measure_relu_flips(case, device, **words)

    def bound_adam(self, case: Case, states: Outcome, truth: Outcome, controls: Sequence[Outcome]) -> Outcome:
        """The largest error that Adam may make of a gradient's rounding in one step, by name."""
        from shardproof.reference.training.adam import bound_adam

        return bound_adam(case, states, truth, controls)

    def shares(self, case: Case, device: "torch.device", **words: Any) -> Outcome:
        """Step 0 taken apart by data rank and micro-batch."""
        from shardproof.reference.training.truth import shares

        return shares(case, device, **words)


DENSE_MODEL = DenseModel()
