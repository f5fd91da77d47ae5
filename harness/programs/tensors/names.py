"""Names of the modules and parameters of a recorded program, without the names that wrappers add.

The first outermost module with trained parameters is the model, and its path is "". Modules that are called beside it
(a discriminator, a criterion) are named by their class. A program may call parts of its model alone, as stages of a
pipeline do: what contains a part is seen when modules are put together.
"""

import sys
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from shardproof.harness.programs.tensors.layouts import Split, split_of, split_of_flat, split_value
from shardproof.harness.torch_internals.flat_parameters import Piece, flat_parameter

_WRAPPED = ("_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")
_INSIDE = "module"
"""The child that DDP and engines wrap; a wrapper has no other."""


class ModulePath(NamedTuple):
    """The path of a module or parameter without the names of wrappers, and with them."""

    name: str
    wrapped: str

    def at(self, key: str, *, hidden: bool = False) -> "ModulePath":
        """The path of the child `key`; `hidden`: it is the name of a wrapper."""
        return ModulePath(self.name if hidden else _join_path(self.name, key), _join_path(self.wrapped, key))


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedParameter:
    """A parameter or buffer. `alias_of` is the name under which it was met before, "" if this is the first."""

    place: ModulePath
    tensor: Tensor
    split: Split
    alias_of: str = ""


@dataclass(slots=True)
class _Around:
    """What contains a module: the innermost DDP or FSDP2 module, names that DDP ignores, parts in FSDP1 by identity."""

    wrapper: nn.Module | None = None
    ignored: frozenset[str] = frozenset()
    inside: str = ""
    pieces: dict[int, Piece] = field(default_factory=dict)


class Enclosing:
    """Knows into which module each module was put last, since this object was made."""

    def __init__(self) -> None:
        self._parents: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
        register_module_module_registration_hook(self._note_part)

    def find_outermost(self, module: nn.Module) -> nn.Module:
        """The outermost module that contains this one, or the module itself."""
        above, around = self._parents.get(module), module
        while above is not None and (parent := above()) is not None:
            if not any(child is around for child in parent.children()):
                break  # it was taken out again
            around, above = parent, self._parents.get(parent)
        return around

    def _note_part(self, parent: nn.Module, _name: str, part: nn.Module | None) -> None:
        if part is not None:
            self._parents[part] = weakref.ref(parent)


@dataclass(slots=True)
class Names:
    """The outermost modules; `modules` by identity (None: a wrapper), `parameters` likewise.

    `listed` are all parameters, each under its first name alone.
    """

    roots: dict[int, tuple[nn.Module, str]] = field(default_factory=dict)
    modules: dict[int, ModulePath | None] = field(default_factory=dict)
    parameters: dict[int, NamedParameter] = field(default_factory=dict)
    listed: list[NamedParameter] = field(default_factory=list)
    wrappers: set[str] = field(default_factory=set)
    _classes: Counter[str] = field(default_factory=Counter)
    _has_model: bool = False
    _flat: set[int] = field(default_factory=set)

    def register(self, root: nn.Module) -> tuple[list[NamedParameter], list[NamedParameter]]:
        """Name an outermost module and all modules in it. Returns its new parameters and floating buffers."""
        prefix = ""
        if self._has_model or not any(parameter.requires_grad for parameter in root.parameters()):
            kind = type(root).__name__
            prefix = f"{kind}#{self._classes[kind]}" if self._classes[kind] else kind
            self._classes[kind] += 1
        else:
            self._has_model = True
        self.roots[id(root)] = root, prefix
        parameters: list[NamedParameter] = []
        buffers: list[NamedParameter] = []
        self._walk(root, ModulePath(prefix, ""), _Around(), parameters, buffers)
        self.listed += [named for named in parameters if not named.alias_of]
        return parameters, buffers

    def clear(self) -> None:
        """Forget all modules and parameters."""
        for kept in (self.roots, self.modules, self.parameters, self.listed):
            kept.clear()

    def _walk(
        self,
        module: nn.Module,
        place: ModulePath,
        around: _Around,
        parameters: list[NamedParameter],
        buffers: list[NamedParameter],
    ) -> None:
        hidden = _hidden_child(module)
        if hidden:
            self.wrappers.add(type(module).__name__)
        if id(module) not in self.modules:
            self.modules[id(module)] = None if hidden else place
        around = self._enter(module, place, around, parameters)
        for key, parameter in module.named_parameters(recurse=False):
            known = self.parameters.get(id(parameter))
            if id(parameter) not in self._flat and (known is None or known.place.name != place.at(key).name):
                parameters.append(self._name_parameter(place.at(key), parameter, around))
        for key, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point() and id(buffer) not in self.parameters:
                buffers.append(NamedParameter(place=place.at(key), tensor=buffer, split=split_value))
        for key, child in module.named_children():
            self._walk(child, place.at(key, hidden=key == hidden), around, parameters, buffers)

    def _enter(
        self, module: nn.Module, place: ModulePath, around: _Around, parameters: list[NamedParameter]
    ) -> _Around:
        """What contains the parameters of a module. Names the flat parameter of FSDP1."""
        if (found := flat_parameter(module)) is not None:
            flat, pieces = found
            if id(flat) not in self.parameters:
                pieces = tuple(piece._replace(name=_without_wrappers(piece.name)) for piece in pieces)
                named = NamedParameter(place=place, tensor=flat, split=split_of_flat(flat, pieces))
                self.parameters[id(flat)] = named
                self._flat.add(id(flat))
                if not any(piece.view is not None for piece in pieces):
                    parameters.append(named)
            around = _Around(pieces=around.pieces | {id(one.view): one for one in pieces if one.view is not None})
        if isinstance(module, nn.parallel.DistributedDataParallel):
            ignored = frozenset(getattr(module, "parameters_to_ignore", ()))
            return _Around(wrapper=module, ignored=ignored, inside=_join_path(place.wrapped, _INSIDE))
        fsdp: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
        return _Around(wrapper=module) if fsdp is not None and isinstance(module, fsdp) else around

    def _name_parameter(self, place: ModulePath, parameter: Tensor, around: _Around) -> NamedParameter:
        first = self.parameters.get(id(parameter))
        if first is not None:
            return NamedParameter(place=place, tensor=parameter, split=first.split, alias_of=first.place.name)
        ignored = around.ignored and place.wrapped.removeprefix(f"{around.inside}.") in around.ignored
        split = split_of(parameter, None if ignored else around.wrapper, around.pieces.get(id(parameter)))
        named = self.parameters[id(parameter)] = NamedParameter(place=place, tensor=parameter, split=split)
        return named


def _hidden_child(module: nn.Module) -> str:
    """The name of the child that a wrapper wraps; "" for a module that is no wrapper."""
    children = [key for key, _child in module.named_children()]
    for key in children:
        if key in _WRAPPED or (children == [_INSIDE] and not next(iter(module.named_parameters(recurse=False)), ())):
            return key
    return ""


def _join_path(path: str, key: str) -> str:
    return f"{path}.{key}" if path and key else path or key


def _without_wrappers(path: str) -> str:
    return ".".join(part for part in path.split(".") if part not in _WRAPPED)
