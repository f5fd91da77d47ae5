"""Names as the ledger prints them: the mesh axis of a group, the dotted path of a module inside the model called.

A path leaves out what only wraps: the leading "module." of DDP, torch.compile's "_orig_mod", the inner names of the
checkpoint wrapper and of FSDP1. So "module.layers.0._checkpoint_wrapped_module.mlp" is "layers.0.mlp", and the model
itself is "".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

__all__ = ["Paths", "axis_name"]

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def axis_name(
    group: tuple[int, ...], group_desc: str, axes: Mapping[str, tuple[tuple[int, ...], ...]], world_size: int
) -> str:
    """The axis of a group of global ranks.

    First what the user called it ("tp", DeviceMesh's "mesh_tp") when the case has such an axis; then the one axis of
    several ranks that has this rank list; then "world" when it holds every rank; else the rank list, "0,2".
    """
    said = group_desc.removeprefix("mesh_")
    if said in axes:
        return said
    ranks = tuple(sorted(group))
    if len(ranks) > 1:
        having = [axis for axis, lists in axes.items() if any(tuple(sorted(ranks_)) == ranks for ranks_ in lists)]
        if len(having) == 1:
            return having[0]
    if len(ranks) == world_size:
        return "world"
    return ",".join(map(str, group))


class Paths:
    """Module -> dotted path and parameter -> path of its module, over every model that was seen being called.

    Identity is what counts: a module may define its own equality. The models are kept alive, so ids stay theirs.
    """

    def __init__(self) -> None:
        self._models: list[nn.Module] = []
        self._of_module: dict[int, str] = {}
        self._of_parameter: dict[int, str] = {}

    def add(self, model: nn.Module) -> None:
        """Learn a model's modules; one that holds models seen before names their modules anew."""
        if id(model) in self._of_module:
            return
        self._models.append(model)
        for path, module in _unwrapped(model):
            self._of_module[id(module)] = path
        for path, module in _unwrapped(model):
            for parameter in module.parameters(recurse=False):
                self._of_parameter.setdefault(id(parameter), path)

    def module(self, module: nn.Module, otherwise: str) -> str:
        """The module's path; `otherwise` (its caller's path) when no model holds it."""
        return self._of_module.get(id(module), otherwise)

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
