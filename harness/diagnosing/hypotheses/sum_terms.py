"""Sums of terms gone wrong: the output of a module with one term left out, scaled or counted otherwise.

An output is the sum of what its own biases and tables add to every row, and of the rest. The output is fitted by these
terms, and the one whose weight is not 1 shows the mistake. A residual sum, and the gradient of what two paths use, have
terms that have names of their own. The wrong one equals such a name, or the truth without it.
"""

import math

import torch
from torch import Tensor

from shardproof.harness.checking.evidence import Evidence
from shardproof.harness.checking.measures.kinds import kind_of
from shardproof.harness.diagnosing.causes.cause import Cause, claimed
from shardproof.harness.diagnosing.causes.hypothesis import Hypothesis, of_values
from shardproof.harness.diagnosing.causes.places import summable
from shardproof.harness.diagnosing.causes.proofs import Explained, explains, share_left, times
from shardproof.harness.diagnosing.hypotheses.factors import Measure, every_size, meaning_of
from shardproof.harness.diagnosing.hypotheses.patterns import by_size
from shardproof.harness.mesh_axes import split_axes

RIGHT = 1e-9
"""An output is right within this share of itself: all weights are 1."""


def from_terms(evidence: Evidence, name: str) -> list[Cause]:
    """Which term of a wrong activation, or of its gradient, does not count once."""
    value, kind = evidence.merged.tensors.get(name), kind_of(name)
    if value is None or kind not in ("act", "act_grad") or not bool(torch.isfinite(value).all()):
        return []
    return (_weighed(evidence, name, value) if kind == "act" else []) or _missing(evidence, name, value)


def added(evidence: Evidence, name: str) -> dict[str, Tensor]:
    """Additions of a module's own parameters to every row of its output: a bias, or a table of rows by token."""
    module, truth = name.partition("/")[2], evidence.truth[name].double()
    inner = [other for other in evidence.truth if other.startswith(f"act/{module}.")]
    found = {}
    for key, start in evidence.shares.items() if not inner else ():
        parameter = key.removeprefix("start/")
        is_own = key != parameter and parameter.startswith(f"{module}.") and parameter != f"{module}.weight"
        if is_own and truth.shape[-start.dim() :] == start.shape and start.dim() < truth.dim():
            found[parameter] = start.double().expand(truth.shape)
    return found


def _weights(evidence: Evidence, name: str) -> dict[str, float]:
    """Term -> its weight in this output, "" for the rest; {} when no weights explain it."""
    value, truth = evidence.merged.tensors.get(name), evidence.truth.get(name)
    terms = added(evidence, name) if value is not None and truth is not None else {}
    if value is None or truth is None or not terms or not bool(torch.isfinite(value).all()):
        return {}
    columns = {"": truth.double() - sum(terms.values()), **terms}
    matrix = torch.stack([column.flatten() for column in columns.values()], 1)
    solved = torch.linalg.lstsq(matrix, value.double().flatten()[:, None], driver="gelsd").solution[:, 0]
    near = float((value.double() - truth.double()).norm()) <= RIGHT * float(truth.double().norm())
    if not near and not explains((matrix @ solved).view_as(truth), value, truth):
        return {}
    return dict(zip(columns, solved.tolist(), strict=True))


def _weighed(evidence: Evidence, name: str, value: Tensor) -> list[Cause]:
    """The one term, or the rest, whose weight in this output is not 1."""
    near, weights = share_left(value), _weights(evidence, name)
    others = {term: weight for term, weight in weights.items() if abs(weight - 1) > near}
    if len(others) != 1:
        return []
    ((term, weight),) = others.items()
    truth, terms = evidence.truth[name].double(), added(evidence, name)

    def predict(factor: float) -> tuple[Explained]:
        alone = terms[term] if term else truth - sum(terms.values())
        return (Explained(value=value, truth=truth, guess=truth + (factor - 1) * alone, names=(name,), fitted=2),)

    if not term:
        relation = f"without {' and '.join(filter(None, weights))} it is {times(weight)} the truth"
        measure: Measure = lambda other: _weights(other, name).get("")  # noqa: E731
        sizes = [size for size in every_size(evidence)[:-1] if summable(evidence, size, name)]
        return meaning_of(evidence, weight, relation, near, measure, predict, sizes)
    what = "bias" if term.endswith(".bias") else term
    if abs(weight) <= near:
        known = "bias_missing" if what == "bias" else "term_missing"
        return claimed(known, f"the {what} is not in it", *predict(0.0))
    summed = {axis: size for axis, size in split_axes(evidence.case).items() if summable(evidence, axis, name)}
    for axis, size in by_size(summed):
        if math.isclose(weight, size, rel_tol=near):
            words = f"the {what} is in it {size} times, and {axis}={size}"
            return claimed("bias_per_rank", words, *predict(size))
    words = f"the {what} is in it {weight:.4g} times"
    return claimed("constant_factor", words, *predict(weight))


def _missing(evidence: Evidence, name: str, value: Tensor) -> list[Cause]:
    """Whether one of two terms is all that there is, or the one that is not there: terms have other names."""
    kind, truth = kind_of(name), evidence.truth[name].double()
    for other, term in evidence.truth.items():
        if kind_of(other) != kind or other == name or term.shape != truth.shape:
            continue
        words = f"it is the truth without {other}"
        rest = Explained(value=value, truth=truth, guess=truth - term.double(), names=(name,))
        if causes := claimed("term_missing", words, rest):
            return causes
        words = f"it is {other} alone"
        alone = Explained(value=value, truth=truth, guess=term, names=(name,))
        if (other.startswith(f"{name}.") or kind == "act_grad") and (causes := claimed("term_missing", words, alone)):
            return causes
    return []


HYPOTHESES = (
    Hypothesis(
        predicts="an activation, or its gradient, with one of its terms left out or counted otherwise",
        causes=of_values(lambda evidence, names: from_terms(evidence, names[0])),
        kinds=frozenset({"act", "act_grad"}),
    ),
)
