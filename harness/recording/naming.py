"""Names in the ledger: the mesh axis of a group, the dotted path of a module inside the model that was called.

A path leaves out what only wraps: the leading "module." of DDP, torch.compile's "_orig_mod", the inner names of the
checkpoint wrapper and of FSDP1. So "module.layers.0._checkpoint_wrapped_module.mlp" is "layers.0.mlp", and the model
itself is "".
"""

import re
import weakref
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from itertools import combinations
from typing import Any

from torch import Tensor, nn

from shardproof.harness.ledger import Call
from shardproof.harness.mesh_axes import KNOWN, PIPELINE, SPELT

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_BY_TORCH = re.compile(r"|undefined|default_pg|mesh_default|mesh_dim_\d+|.*:split:\d+")
"""Descriptions that torch gives by default."""
_WORLD = ("default_pg", "mesh_default")
"""torch's own names for the group of all ranks. If one axis of the case has all ranks, its name is certain."""
_FILLERS = frozenset({"parallel", "group", "gloo", "ag", "and", "with", "partial"})


@lru_cache(maxsize=256)
def group_word(group_desc: str) -> str:
    """The name that a description gives its group, "" for the words that torch gives to every group by itself.

    The name is those of the axes, joined by _: DeviceMesh's "mesh_dp_shard" is "dp_shard", torchtitan's "mesh_batch" is
    "dp", Megatron-Core's "DATA_PARALLEL_GROUP_WITH_CP" is "dp_cp". A description in other words stays as it is.
    """
    if _BY_TORCH.fullmatch(group_desc):
        return ""
    described = group_desc.removeprefix("mesh_")
    words = [word for word in described.lower().split("_") if word not in _FILLERS]
    axes = _axes_in(words)
    understood = described.isupper() or all(axis in KNOWN for axis in axes if axis in words)
    return "_".join(axes) if understood and KNOWN.intersection(axes) else described


def _axes_in(words: list[str]) -> list[str]:
    """The words, with those that SPELT knows replaced by the names of axes."""
    axes: list[str] = []
    at = 0
    while at < len(words):
        for length in range(len(words) - at, 0, -1):
            if meant := SPELT.get(" ".join(words[at : at + length])):
                axes += meant.split()
                break
        else:
            axes.append(words[at])
        at += length
    return axes


class AxisNames:
    """The axes of groups, each looked up once. `axes` maps those of the case to their rank lists."""

    def __init__(self, axes: Mapping[str, tuple[tuple[int, ...], ...]], world_size: int) -> None:
        self._axes, self._world_size = axes, world_size
        self._known: dict[tuple[tuple[int, ...], str, bool], tuple[str, str]] = {}

    def of(self, call: Call, phase: str) -> tuple[str, str]:
        """The axis of a call's group, and what is uncertain about it, or "". In phase pipeline pp alone is an axis."""
        key = call.group, call.group_desc, phase == "pipeline"
        if key not in self._known:
            axes = {axis: lists for axis, lists in self._axes.items() if axis == PIPELINE or phase != "pipeline"}
            self._known[key] = axis_name(call.group, call.group_desc, axes, self._world_size)
        return self._known[key]


def axis_name(
    group: tuple[int, ...], group_desc: str, axes: Mapping[str, tuple[tuple[int, ...], ...]], world_size: int
) -> tuple[str, str]:
    """The axis of a group of global ranks, and what is uncertain about it, or "".

    First comes the program's name of the group ("tp", DeviceMesh's "mesh_tp", Megatron-Core's names). It is used if the
    case has such an axis, or if it is a known word for something else ("ep", "dp_cp"). Of joint words ("dp_shard",
    "dp_cp") those axes are used that together have the same ranks. Then comes the axis with this rank list, if it is
    the only one and has several ranks; then an unknown word as it is; then "world" for all ranks; else the rank list.
    """
    described, ranks = group_word(group_desc), tuple(sorted(group))
    if described in axes:
        return described, ""
    split = axes if len(ranks) > 1 else {}
    joint = described.split("_") if described else []
    if meant := _together(ranks, [axis for axis in joint if axis in split], axes):
        return meant, ""
    if set(joint) & (KNOWN | axes.keys()):
        return described, ""
    having = [axis for axis, lists in split.items() if any(tuple(sorted(ranks_)) == ranks for ranks_ in lists)]
    if len(having) == 1 and group_desc in _WORLD:
        return having[0], ""
    if len(having) == 1:
        why = f"is described as {group_desc!r}" if described else "has no description"
        return having[0], f"axis {having[0]} is named by the ranks of its group, which {why}"
    if described:
        return described, ""
    return "world" if len(ranks) == world_size else ",".join(map(str, group)), ""


def _together(ranks: tuple[int, ...], named: list[str], axes: Mapping[str, tuple[tuple[int, ...], ...]]) -> str:
    """The smallest set of these axes whose joined groups have the ranks, as "dp_cp"; "" for none or several."""
    for count in range(1, len(named) + 1):
        found = [some for some in combinations(named, count) if _find_joined_ranks(ranks[0], some, axes) == set(ranks)]
        if found:
            return "_".join(found[0]) if len(found) == 1 else ""
    return ""


def _find_joined_ranks(rank: int, some: tuple[str, ...], axes: Mapping[str, tuple[tuple[int, ...], ...]]) -> set[int]:
    """The ranks that are connected with this one by groups of these axes."""
    joined, before = {rank}, 0
    while len(joined) > before:
        before = len(joined)
        joined.update(*(ranks for axis in some for ranks in axes[axis] if not joined.isdisjoint(ranks)))
    return joined


class Paths:
    """Module -> dotted path and parameter -> path of its module, for every model that was called.

    Modules are told apart by identity, since a module may define its own equality. No model is kept alive, and freed
    ones are forgotten, so that an id is never taken for another's.
    """

    def __init__(self) -> None:
        self._models: list[weakref.ref[nn.Module]] = []
        self._of_module: dict[int, str] = {}
        self._of_parameter: dict[int, str] = {}
        self._alive: dict[int, weakref.ref[Any]] = {}

    @property
    def models(self) -> list[nn.Module]:
        """The models that were called and still exist, in the order of their first calls."""
        return [model for reference in self._models if (model := reference()) is not None]

    def add(self, model: nn.Module) -> None:
        """Learn the modules of a model. A model that contains models seen before names their modules anew."""
        if id(model) in self._of_module:
            return
        self._models = [reference for reference in self._models if reference() is not None] + [weakref.ref(model)]
        named = list(_named_modules_unwrapped(model))
        for path, module in named:
            self._of_module[id(module)] = path
            self._follow(module, self._of_module)
        for path, module in named:
            for parameter in module.parameters(recurse=False):
                self._of_parameter.setdefault(id(parameter), path)
                self._follow(parameter, self._of_parameter)

    def _follow(self, known: Any, table: dict[int, str]) -> None:
        self._alive.setdefault(id(known), weakref.ref(known, partial(self._on_drop, id(known), table)))

    def _on_drop(self, known: int, table: dict[int, str], _reference: object) -> None:
        table.pop(known, None)
        self._alive.pop(known, None)

    def module(self, module: nn.Module, otherwise: str) -> str:
        """The path of the module; `otherwise` (its caller's path) if it is in no model."""
        return self._of_module.get(id(module), otherwise)

    def is_part(self, module: nn.Module, counted: Mapping[tuple[int, bool], int]) -> bool:
        """Whether an outermost module is part of the current micro-batch.

        It is if it belongs to a model that has not made a micro-batch of its own in this step, such as the head of a
        chunked loss. `counted`: the ids of the models that have, and whether gradients were on.
        """
        inside = bool(self._of_module.get(id(module)))
        return inside and bool(counted) and all(model != id(module) for model, _ in counted)

    def parameter(self, parameter: Tensor | None) -> str:
        """The path of the module that owns the parameter; "" if none does."""
        return self._of_parameter.get(id(parameter), "")


def _named_modules_unwrapped(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """`model.named_modules()` with the wrappers' own names left out of the paths."""
    leading = 0
    inner = model
    while [name for name, _ in inner.named_children()] in (["module"], ["_orig_mod"]):
        inner = next(inner.children())
        leading += 1
    for path, module in model.named_modules():
        parts = path.split(".")[leading:] if path else []
        yield ".".join(part for part in parts if part not in _WRAPPERS), module
