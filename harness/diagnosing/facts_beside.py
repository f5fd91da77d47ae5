"""Facts beside the first place: which ranks are wrong and which are right, and what lies between two modules.

Ranks are named by their coordinates on the mesh, where the wrong ones are all ranks of some coordinates of an axis, or
of several. So "wrong on cp rank 1 alone, right on cp rank 0". Code that no module owns is named by the modules around
it, one whose values are right and one whose are wrong. So "between wqkv and wo: the attention core".
"""

import itertools
from collections.abc import Collection, Mapping, Sequence

from harness.checking.evidence import Evidence
from harness.checking.measures.kinds import kind_of
from harness.diagnosing.rules.places import ranks_apart
from harness.errors import ranks_text
from harness.mesh_axes import place_of_rank, split_axes

_CORES: Mapping[str, str] = {"attention": "the attention core", "mlp": "the activation function"}
"""Last word of a module -> what its own code computes between two linears."""


def ranks_in_words(evidence: Evidence, name: str, wrong: Collection[str]) -> str:
    """The ranks where a name is wrong by their coordinates; "" when that is all of them, or no such set.

    A gradient or parameter that is wrong wherever it is held: the ranks that hold any wrong one, by all of its kind.
    """
    bad, good = ranks_apart(evidence, [name])
    if not good and kind_of(name) in ("grad", "param", "param_after"):
        alike = [other for other in evidence.truth if kind_of(other) == kind_of(name)]
        bad, good = ranks_apart(evidence, alike)
    if not bad or not good:
        return ""
    axes = {axis: evidence.axes[axis] for axis in split_axes(evidence.case) if axis in evidence.axes}
    for count in (1, 2):
        for some in itertools.combinations(axes, count):
            places = {rank: tuple(place_of_rank(axes, axis, rank) for axis in some) for rank in (*bad, *good)}
            mine, others = {places[rank] for rank in bad}, {places[rank] for rank in good}
            if not mine & others and (count == 1 or len(mine) == 1):
                return f"wrong on {_in_words(some, mine)} alone, right on {_in_words(some, others)}"
    return ""


def _in_words(axes: Sequence[str], places: Collection[tuple[int, ...]]) -> str:
    """Coordinates in words: "cp rank 1", "cp ranks 0 1", "tp rank 0 of dp rank 1"; several of two axes are "others"."""
    if len(axes) > 1 and len(places) > 1:
        return "others"
    if len(axes) > 1:
        return " of ".join(f"{axis} rank {place}" for axis, place in zip(axes, *places, strict=True))
    found = sorted(place for (place,) in places)
    return f"{axes[0]} rank{'s' * (len(found) > 1)} {ranks_text(found)}"


def between(evidence: Evidence, name: str, wrong: Collection[str]) -> str:
    """The two modules between which the first wrong activation, or gradient of one, lies in code that has no name.

    The value of the one is right, that of the other wrong; "" where a module of its own computes the wrong value.
    """
    kind, _, module = name.partition("/")
    order = [other.partition("/")[2] for other in evidence.truth if kind_of(other) == "act"]
    around = module.rpartition(".")[0]
    line = [other for other in order if other.rpartition(".")[0] == around]
    if kind not in ("act", "act_grad") or not around or module not in line[1 if kind == "act" else 0 :]:
        return ""
    last, at = line[-1], line.index(module)  # modules before the last one may stand side by side
    one, itself, passed = (line[at - 1], module, line[:at]) if kind == "act" else (last, last, line[at + 1 :])
    values = evidence.merged.tensors
    right = all(f"{kind}/{other}" in values and f"{kind}/{other}" not in wrong for other in passed)
    if not passed or not right or (kind == "act" and module != last) or not are_matrices(evidence, module, last):
        return ""
    core = _CORES.get(around.rpartition(".")[2], "code of its own")
    one, module, itself = (name.rpartition(".")[2] for name in (one, module, itself))
    return f"between {one}, which is right, and {module} of {around}: {core}, or {itself} itself"


def are_matrices(evidence: Evidence, *modules: str) -> bool:
    """Whether these modules are linears: what one returns goes through code of the module around it to another."""
    weights = (evidence.truth.get(f"grad/{module}.weight") for module in modules)
    return all(weight is not None and weight.dim() > 1 for weight in weights)
