"""What a subject is compared with: the functions of the dense model, by name, or a truth of the subject's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch import Tensor

from harness.engines.engine import Engine
from harness.running.truth.own_truth import OwnTruth
from harness.subject import NamedSubject, truth_of

Function: TypeAlias = "str | Callable[..., Mapping[str, Tensor]]"
"""A function of the reference: its name, module:object, or itself (a truth of the subject's own: OwnTruth)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The dense model's functions (case, device) -> outcome, by name or as they are: truth, and control runs beside it.

    `kinks` and `slack` widen limits, so they belong to their truth: "", none, unless they are named with it. So do
    `anchors`, case -> what is stated about the data that truth and ranks both read (harness.protocols.FactsLike). With
    `slack` truth, control and kinks take states=mapping too, the subject's states from which their steps begin.
    `control` takes parts=n too, the number of partial sums in place of its own choice.
    `alike`, case -> case, gives cases that are one to the dense model the same case; "" where each is its own. The
    truth is computed of that case, once for all that are alike. `given`, case -> kinds of names, says what of the
    subject's outcome these functions cannot know and take as given=mapping; the truth is computed after the run then,
    anew for each. "" where they know all; `known`, case -> case, gives a case with equal names that leaves nothing to
    be given. `deviations`, case -> standard deviations by parameter, is for initial values that a subject returns.
    Activations are among outcomes of truth and control.
    The others are computed when a failure is explained: step 0 taken apart by data rank and micro-batch, and what comes
    of data or weights that are read otherwise (see `reference.what_ifs.inputs`), of other rules of the steps and of the
    modules.
    """

    truth: Function = "reference.training.subject:truth"
    control: Function = "reference.training.control:control"
    kinks: str = ""
    slack: str = ""
    anchors: str = ""
    alike: str = ""
    given: str = ""
    known: str = ""
    deviations: str = ""
    shares: str = "reference.what_ifs.shares:shares"
    alternatives: str = "reference.what_ifs.inputs:alternatives"
    trainings: str = "reference.what_ifs.training:trainings"
    rules: str = "reference.what_ifs.rules:rules"
    metrics: str = "reference.what_ifs.metrics:metrics"


REFERENCE = Reference(
    kinks="reference.training.kinks:kinks",
    slack="reference.training.adam:slack",
    anchors="reference.data.anchors:anchors",
    alike="reference.model.dense_case:dense_case",
    given="reference.training.given:kinds",
    known="reference.training.given:known",
    deviations="reference.training.given:deviations",
)
_NOTHING = dict.fromkeys(("shares", "alternatives", "trainings", "rules", "metrics"), "")


def reference_of(subject: NamedSubject, engine: Engine, timeout_s: float = 60.0) -> Reference:
    """What a subject is compared with: the decoder, or a truth of its own. Raises RequestError when it is none."""
    dense = truth_of(subject)
    if dense is None:
        return REFERENCE
    own = OwnTruth(subject=subject, dense=dense, engine=engine, timeout_s=timeout_s)
    return Reference(truth=own, control=replace(own, control=True), **_NOTHING)
