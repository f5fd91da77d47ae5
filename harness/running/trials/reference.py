"""References of a case: our dense model, or the subject's own truth."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor

from shardproof.harness.dense_model import DenseModelLike, dense_model
from shardproof.harness.engines.engine import Engine
from shardproof.harness.subject import NamedSubject, truth_of

if TYPE_CHECKING:
    from shardproof.harness.running.truth.own import OwnTruth

Function: TypeAlias = "Callable[..., Mapping[str, Tensor]]"
"""A function (case, device) -> outcome: of the dense model, or a truth of the subject's own (OwnTruth)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A reference of a case: the truth, and control runs beside it. Activations are among their outcomes.

    `control` takes parts=n too, the number of partial sums in place of its own choice. `model` is our dense model where
    it is the truth. Of it alone is known what widens limits (`kinks`, `adam_slack`), and which rows nothing looks up.
    Its truth, control and kinks take states=mapping, the subject's states from which their steps begin. `own` is the
    truth where it is the subject's own.
    """

    truth: Function
    control: Function
    model: DenseModelLike | None = None
    own: "OwnTruth | None" = None


def reference_of(subject: NamedSubject, engine: Engine, timeout_s: float = 60.0) -> Reference:
    """Reference of a subject: our dense model, or its own truth. Raises RequestError when that is none."""
    dense = truth_of(subject)
    if dense is None:
        return decoder()
    from shardproof.harness.running.truth.own import OwnTruth  # noqa: PLC0415

    own = OwnTruth(subject=subject, dense=dense, engine=engine, timeout_s=timeout_s)
    return Reference(truth=own, control=replace(own, control=True), own=own)


def decoder() -> Reference:
    """Our dense model as a truth."""
    model = dense_model()
    return Reference(truth=model.truth, control=model.control, model=model)
