"""Names as the ledger prints them: the mesh axis of a group, the dotted path of a module inside the model called.

A path leaves out what only wraps: the leading "module." of DDP, torch.compile's "_orig_mod", the inner names of the
checkpoint wrapper and of FSDP1. So "module.layers.0._checkpoint_wrapped_module.mlp" is "layers.0.mlp", and the model
itself is "".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

__all__ = ["Paths", "axis_name", "group_word"]

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_BY_TORCH = re.compile(r"|undefined|default_pg|mesh_default|mesh_dim_\d+|.*:split:\d+")
"""Descriptions that torch gives by default."""
_WORLD = ("default_pg", "mesh_default")
"""torch's own names for the group of all ranks: the only axis of the case that has them all is no guess."""
_FILLERS = frozenset({"parallel", "group", "gloo", "ag", "and", "with"})
_SPELT = {
    "tensor": "tp",
    "tensor_model": "tp",
    "data": "dp",
    "context": "cp",
    "pipeline": "pp",
    "pipeline_model": "pp",
    "pipe": "pp",
    "stage": "pp",
    "MODEL_PARALLEL_GROUP": "tp_pp",
    "data_cp": "dp_cp",
    "tensor_data": "tp_dp",
    "tensor_data_cp": "tp_dp_cp",
    "tensor_context": "tp_cp",
    "expert": "ep",
    "experts": "ep",
    "expert_model": "ep",
    "expert_data": "edp",
    "expert_tensor": "etp",
    "expert_tensor_model": "etp_ep",
    "expert_tensor_model_pipeline": "etp_ep_pp",
    "efsdp": "edp",
    "embd": "embedding",
    "embedding": "embedding",
    "position_embedding": "position_embedding",
}
"""Words of Megatron-Core (parallel_state.initialize_model_parallel), without fillers, and of torchtitan's meshes."""
_KNOWN = frozenset(_SPELT.values()) | {"wp", "wdp"}


def group_word(group_desc: str) -> str:
    """The name that a description gives its group, "" for the words that torch gives to every group by itself.

    DeviceMesh's "mesh_dp_shard" is "dp_shard"; Megatron-Core's "DATA_PARALLEL_GROUP_WITH_CP" is "dp_cp".
    """
    if _BY_TORCH.fullmatch(group_desc):
        return ""
    if (said := group_desc.removeprefix("mesh_")) in _SPELT:
        return _SPELT[said]
    parts = [part for part in said.lower().split("_") if part not in _FILLERS]
    return _SPELT.get("_".join(parts), said)


def axis_name(
    group: tuple[int, ...], group_desc: str, axes: Mapping[str, tuple[tuple[int, ...], ...]], world_size: int
) -> tuple[str, str]:
    """The axis of a group of global ranks, and what is not certain of it: "" where nothing is.

    First what the program called the group ("tp", DeviceMesh's "mesh_tp", Megatron-Core's names) when the case has such
    an axis, or when it is a known word for something else ("ep", "dp_cp"); of joint words ("dp_shard", "dp_cp") the one
    axis that has the same ranks. Then the one axis of several ranks that has this rank list; then an unknown word as it
    is; then "world" when the group holds every rank; else the rank list, "0,2".
    """
    said, ranks = group_word(group_desc), tuple(sorted(group))
    if said in axes:
        return said, ""
    split = axes if len(ranks) > 1 else {}
    having = [axis for axis, lists in split.items() if any(tuple(sorted(ranks_)) == ranks for ranks_ in lists)]
    joint = said.split("_") if said else []
    meant = [axis for axis in having if axis in joint]
    if len(meant) == 1:
        return meant[0], ""
    if said in _KNOWN or set(joint) & axes.keys():
        return said, ""
    if len(having) == 1 and group_desc in _WORLD:
        return having[0], ""
    if len(having) == 1:
        why = f"its group is described as {group_desc!r}" if said else "its group has no description"
        return having[0], f"axis {having[0]}: {why}, so it is named after the axis of the case that has the same ranks"
    if said:
        return said, ""
    return "world" if len(ranks) == world_size else ",".join(map(str, group)), ""


class Paths:
    """Module -> dotted path and parameter -> path of its module, over every model that was seen being called.

    Identity is what counts: a module may define its own equality. The models are kept alive, so ids stay theirs.
    """

    def __init__(self) -> None:
        self._models: list[nn.Module] = []
        self._of_module: dict[int, str] = {}
        self._of_parameter: dict[int, str] = {}

    @property
    def models(self) -> list[nn.Module]:
        """The models that were seen being called, the first one first."""
        return self._models

    def add(self, model: nn.Module) -> None:
        """Learn a model's modules; one that holds models seen before names their modules anew."""
        if id(model) in self._of_module:
            return
        self._hold(model)
        for path, module in _unwrapped(model):
            self._of_module[id(module)] = path
        for path, module in _unwrapped(model):
            for parameter in module.parameters(recurse=False):
                self._of_parameter.setdefault(id(parameter), path)

    def _hold(self, model: nn.Module) -> None:
        self._models.append(model)

    def module(self, module: nn.Module, otherwise: str) -> str:
        """The module's path; `otherwise` (its caller's path) when no model holds it."""
        return self._of_module.get(id(module), otherwise)

    def is_part(self, module: nn.Module, counted: Mapping[tuple[int, bool], int]) -> bool:
        """Whether a module that no other encloses is part of the micro-batch that is going on: one inside of a model
        that did not count by itself in this step, such as the head that a chunked loss calls for every chunk.
        `counted`: the ids of the models that did, and whether gradients were on.
        """
        inside = bool(self._of_module.get(id(module)))
        return inside and bool(counted) and all(model != id(module) for model, _ in counted)

    def parameter(self, parameter: Tensor | None) -> str:
        """Path of the module that owns the parameter; "" when none does."""
        return self._of_parameter.get(id(parameter), "")


def _unwrapped(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """`model.named_modules()` with the wrappers' own names left out of the paths."""
    leading = 0
    inner = model
    while [name for name, _ in inner.named_children()] in (["module"], ["_orig_mod"]):
        inner = next(inner.children())
        leading += 1
    for path, module in model.named_modules():
        parts = path.split(".")[leading:] if path else []
        yield ".".join(part for part in parts if part not in _WRAPPERS), module
