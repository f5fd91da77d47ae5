"""torch.distributed's one world, given to every rank thread of a process as a world of its own.

torch keeps its groups in one object, `distributed_c10d._world`, and one registry of names. `by_thread` changes the
object's class for a time, and has the registry kept per thread. The class answers each thread from its own tables and
every other thread as before. `redirected` redirects torch's own functions inside torch's wrappers, so that names
imported earlier are redirected as well.
"""

import concurrent.futures.thread as executors
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import Thread, get_ident
from types import CellType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from shardproof.harness.errors import RequestError
from shardproof.harness.torch_internals.lookup import lacking, standing

_FEATURE = "the in-process engine"
_registry: Any = torch._C._distributed_c10d
_TABLES = (
    *("default_pg", "group_count", "pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg"),
    *("pg_to_tag", "pg_coalesce_state"),
)
_NEEDED = {
    c10d: "_world _World _new_process_group_helper _find_pg_by_ranks_and_tag init_process_group split_group",
    _registry: "_register_process_group _unregister_all_process_groups _set_thread_isolation_mode",
    getattr(c10d, "_World", object): " ".join(_TABLES),
}


@dataclass(slots=True, eq=False, kw_only=True)
class Tables:
    """Content of torch's `_World`, which it holds for a process, for one rank."""

    default_pg: Any = None
    group_count: int = 0
    pg_map: dict[Any, Any] = field(default_factory=dict)
    pg_names: dict[Any, Any] = field(default_factory=dict)
    pg_group_ranks: dict[Any, Any] = field(default_factory=dict)
    pg_backend_config: dict[Any, Any] = field(default_factory=dict)
    tags_to_pg: dict[Any, Any] = field(default_factory=dict)
    pg_to_tag: dict[Any, Any] = field(default_factory=dict)
    pg_coalesce_state: dict[Any, Any] = field(default_factory=dict)


def _of_thread(of_process: property, name: str) -> property:
    """A property of `_World` that a rank thread has to itself."""

    def read(world: Any) -> Any:
        mine = world._ranks.get(get_ident())
        return of_process.__get__(world) if mine is None else getattr(mine, name)

    def write(world: Any, value: Any) -> None:
        mine = world._ranks.get(get_ident())
        if mine is None:
            of_process.__set__(world, value)
        else:
            setattr(mine, name, value)

    return property(read, write)


@functools.cache
def _ranked_world() -> type:
    """The class of a world that answers a rank thread from its tables. Raises MachineError where torch lacks a part."""
    if missing := _missing():
        raise lacking(_FEATURE, ", ".join(missing))
    kind: Any = c10d._World
    return type("RankedWorld", (kind,), {name: _of_thread(getattr(kind, name), name) for name in _TABLES})


def _missing() -> list[str]:
    return [
        f"{getattr(owner, '__name__', owner)}.{name}"
        for owner, names in _NEEDED.items()
        for name in names.split()
        if not hasattr(owner, name)
    ]


@contextmanager
def by_thread() -> Iterator[dict[int, Any]]:
    """Within it threads have worlds of their own: those in the dict that is yielded, by thread, as Tables.

    Uses distributed_c10d._world and _World, and torch._C._distributed_c10d._set_thread_isolation_mode. Raises
    RequestError when another run is active in this process, MachineError where torch lacks a part.
    """
    ranked = _ranked_world()
    world: Any = c10d._world
    if isinstance(world, ranked):
        raise RequestError("run: another in-process run is active in this process; legal: one run at a time")
    ranks: dict[int, Any] = {}
    torch_world = type(world)
    world._ranks = ranks
    with ExitStack() as undo:
        undo.callback(world.__dict__.pop, "_ranks")
        world.__class__ = ranked
        undo.callback(setattr, world, "__class__", torch_world)
        _registry._set_thread_isolation_mode(True)
        undo.callback(_registry._set_thread_isolation_mode, False)
        yield ranks


def rank_tables() -> Any:
    """The tables of the rank that this thread is; None in every other thread."""
    ranks = getattr(c10d._world, "_ranks", None)
    return None if ranks is None else ranks.get(get_ident())


def register(name: str, group: Any) -> None:
    """Let operators find the group by its name, in this thread. torch._C._distributed_c10d._register_process_group."""
    _registry._register_process_group(name, group)


def leave_world() -> None:
    """This thread is no rank any more, and its names are gone. Uses _unregister_all_process_groups."""
    ranks = getattr(c10d._world, "_ranks", {})
    if ranks.pop(get_ident(), None) is not None:
        _registry._unregister_all_process_groups()


@contextmanager
def in_world_of(tables: Any) -> Iterator[None]:
    """Within it this thread is the rank of these tables; groups that it makes later have no names here.

    A backward in it stays in it, as on the rank's own thread. Afterwards the thread is what it was.
    """
    ranks, ident = getattr(c10d._world, "_ranks", None), get_ident()
    if ranks is None:  # the run has ended
        yield
        return
    before = ranks.pop(ident, None)
    _registry._unregister_all_process_groups()  # an executor's thread may have ended a job after an earlier run
    torch.autograd.set_multithreading_enabled(False)
    _enter_tables(ranks, ident, tables)
    try:
        yield
    finally:
        leave_world()
        if before is not None:
            _enter_tables(ranks, ident, before)


def not_waited_for(thread: Thread) -> None:
    """At its end the process does not wait for this thread of an executor. Uses concurrent.futures' _threads_queues."""
    getattr(executors, "_threads_queues", {}).pop(thread, None)


def _enter_tables(ranks: dict[int, Any], ident: int, tables: Any) -> None:
    ranks[ident] = tables
    for group, name in tables.pg_names.items():
        register(name, group)


def group_of_ranks(tag: str, ranks: tuple[int, ...]) -> Any:
    """The group with a user's tag and these ranks, None when there is none. c10d._find_pg_by_ranks_and_tag."""
    return c10d._find_pg_by_ranks_and_tag(tag, list(ranks))


def ranks_of(group: Any) -> tuple[int, ...]:
    """Global ranks in group order; a group that is not in the tables of torch.distributed counts its own.

    Uses distributed_c10d._world.pg_group_ranks, else dist.get_process_group_ranks.
    """
    world = getattr(c10d, "_world", None)
    if world is None:
        return tuple(dist.get_process_group_ranks(group))
    known = world.pg_group_ranks.get(group)
    return tuple(range(group.size())) if known is None else tuple(sorted(known, key=known.__getitem__))


_signature = functools.lru_cache(maxsize=8)(inspect.signature)
Maker = Callable[..., tuple[Any, Any]]
"""Makes (group, its store) from the arguments of torch's maker of groups."""


@contextmanager
def groups_made_by(maker: Callable[[Maker, inspect.BoundArguments], tuple[Any, Any]]) -> Iterator[None]:
    """Within it, below new_group and init_process_group, groups are made by maker(torch's own maker, arguments).

    The arguments have names: backend, group_name, global_ranks_in_group, group_size, and others. Uses
    distributed_c10d._new_process_group_helper. Raises MachineError where torch lacks it.
    """
    helper: Any = getattr(c10d, "_new_process_group_helper", None)
    if helper is None:
        raise lacking("making groups", "distributed_c10d._new_process_group_helper")

    @functools.wraps(helper)
    def made(*arguments: Any, **words: Any) -> Any:
        return maker(helper, _signature(helper).bind(*arguments, **words))

    with standing(c10d, "_new_process_group_helper", made):
        yield


@contextmanager
def redirected(function: Callable[..., Any], replacement: Callable[..., Any]) -> Iterator[None]:
    """In the body, `function` is `replacement`, which is given the original first. Raises MachineError if it cannot."""
    cells: tuple[CellType, ...] = getattr(function, "__closure__", None) or ()  # of torch's logging wrapper
    cell = next((one for one in cells if getattr(one.cell_contents, "__name__", "") == function.__name__), None)
    if cell is None:
        raise lacking("the world of an engine", f"wrapper that holds {function.__name__}")
    original = cell.cell_contents
    cell.cell_contents = functools.update_wrapper(functools.partial(replacement, original), original)
    try:
        yield
    finally:
        cell.cell_contents = original
