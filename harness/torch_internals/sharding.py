"""Keeps decisions of DTensor from one run of an engine to the next.

DTensor decides how to compute an operator from shapes, placements and the shape of the mesh. It keeps its decisions for
the thread and the mesh that asked. Both are new in every run of ranks that are threads, so every run would decide
everything again: measured, 20 of 34 seconds of the proof of Muon on DTensors.

A decision names meshes. It is kept without them, and returned with the mesh of the rank that asks.

Source: torch.distributed.tensor._sharding_prop.ShardingPropagator.propagate_op_sharding_non_cached.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from shardproof.harness.torch_internals.lookup import replace_attribute

_MODULE = "torch.distributed.tensor._sharding_prop"
_DECIDE = "propagate_op_sharding_non_cached"
_NAMES = ("DTensorSpec", "OpSchema", "OutputSharding")
"""The dataclasses of which a question and its decision are made; a DTensorSpec has the mesh."""
_DEVICES = ("cpu", "cuda")
_MOST = 8192


class _Parts(NamedTuple):
    """An object of one of these classes without its mesh: its fields by name, and whether it has a mesh."""

    kind: type
    fields: tuple[tuple[str, Any], ...]
    has_mesh: bool


class _OtherMesh(Exception):
    """A question names no mesh or several, or its decision names another one."""


class Decisions:
    """What DTensor has decided on the ranks of one engine."""

    def __init__(self) -> None:
        self._known: dict[object, tuple[list[object], object]] = {}

    @contextmanager
    def share_decisions(self) -> Iterator[None]:
        """Within it each decision is made only once. Nothing changes if torch lacks a name."""
        module: Any = sys.modules.get(_MODULE)
        propagator = getattr(module, "ShardingPropagator", None)
        decide = getattr(propagator, _DECIDE, None)
        kinds = tuple(getattr(module, name, None) for name in _NAMES)
        if decide is None or None in kinds:
            yield
            return

        def decide_once(propagator: Any, schema: Any) -> Any:
            return self._decision(propagator, schema, decide, kinds)

        with replace_attribute(propagator, _DECIDE, decide_once):
            yield

    def _decision(self, propagator: Any, schema: Any, decide: Callable[..., Any], kinds: tuple[Any, ...]) -> Any:
        try:
            mesh = _mesh_of(schema, kinds)
            asked = _question(schema, mesh, kinds)
            hash(asked)
        except (AttributeError, TypeError, _OtherMesh):  # symbolic sizes, several meshes, a schema of another torch
            return decide(propagator, schema)
        rules = [table.get(schema.op) for table in vars(propagator).values() if isinstance(table, dict)]
        made_by, kept = self._known.get(asked, ([], None))
        if kept is not None and len(rules) == len(made_by) and all(map(_is_same, rules, made_by)):
            return _with_mesh(kept, mesh)
        decision = decide(propagator, schema)
        try:
            parts = _without_mesh(decision, mesh, kinds)
        except (AttributeError, _OtherMesh):
            return decision
        if len(self._known) >= _MOST:
            self._known.clear()
        self._known[asked] = rules, parts
        return decision


def _is_same(one: object, other: object) -> bool:
    return one is other


def _mesh_of(value: Any, kinds: tuple[Any, ...]) -> Any:
    """The only mesh of a question. Raises _OtherMesh if there is none, or several."""
    meshes: list[Any] = []

    def look(one: Any) -> None:
        if type(one) is kinds[0]:
            meshes.append(one.mesh)
        elif isinstance(one, list | tuple):
            for part in one:
                look(part)

    look(value.args_schema)
    look(tuple(value.kwargs_schema.values()))
    if not meshes or any(mesh is not meshes[0] for mesh in meshes):
        raise _OtherMesh
    return meshes[0]


def _question(schema: Any, mesh: Any, kinds: tuple[Any, ...]) -> object:
    """All that a decision depends on. The rank's place in the mesh is part of it, since it decides uneven shards.

    Raises TypeError if the rank is not in the mesh, or while torch compiles.
    """
    if torch.compiler.is_compiling():
        raise TypeError
    autocast = tuple(torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) for device in _DEVICES)
    setting = (torch.get_default_dtype(), torch.is_inference_mode_enabled(), autocast)
    ranks = getattr(mesh, "_flatten_rank_map", None)
    place = (mesh.shape, mesh.mesh_dim_names, mesh.device_type, ranks, tuple(mesh.get_coordinate()))
    words = (schema.args_schema, schema.kwargs_schema)
    return setting, place, schema.op, _with_types(_without_mesh(words, mesh, kinds))


def _with_types(value: Any) -> object:
    """The value with its type at every depth, since 1 and 1.0 and True are equal. Raises TypeError for a tensor."""
    if isinstance(value, torch.Tensor | torch.Generator):
        raise TypeError
    if isinstance(value, list | tuple):
        return type(value), tuple(map(_with_types, value))
    if isinstance(value, dict):
        return dict, tuple((word, _with_types(one)) for word, one in value.items())
    return type(value), value


def _without_mesh(value: Any, mesh: Any, kinds: tuple[Any, ...]) -> Any:
    """The value in which every object of `kinds` is replaced by its parts. Raises _OtherMesh if one
    has another mesh.
    """
    if type(value) in kinds:
        names = [field.name for field in dataclasses.fields(value) if field.init and not field.name.startswith("_")]
        has_mesh = "mesh" in names
        if has_mesh and value.mesh is not mesh:
            raise _OtherMesh
        parts = tuple((name, _without_mesh(getattr(value, name), mesh, kinds)) for name in names if name != "mesh")
        return _Parts(type(value), parts, has_mesh)
    if type(value) in {list, tuple}:
        return type(value)(_without_mesh(one, mesh, kinds) for one in value)
    if type(value) is dict:
        return {word: _without_mesh(one, mesh, kinds) for word, one in value.items()}
    return value


def _with_mesh(value: Any, mesh: Any) -> Any:
    """The object that `_without_mesh` was given, created again on this mesh."""
    if isinstance(value, _Parts):
        words = {name: _with_mesh(one, mesh) for name, one in value.fields}
        return value.kind(**words, **({"mesh": mesh} if value.has_mesh else {}))
    if type(value) in {list, tuple}:
        return type(value)(_with_mesh(one, mesh) for one in value)
    if type(value) is dict:
        return {word: _with_mesh(one, mesh) for word, one in value.items()}
    return value
