"""torch.distributed's one world, given to every rank thread of a process as a world of its own.

torch keeps its groups in one object, `distributed_c10d._world`, and one registry of names. `by_thread` changes the
object's class for a time, and has the registry kept per thread. The class answers each rank's thread from that rank's
tables and other threads as before. `redirect_function` redirects torch's own functions inside torch's wrappers, so that
names imported earlier are redirected as well. Our groups and works answer to torch's private names (`answers_torch`).

Device meshes of ranks that are threads of one process are kept apart (`kept_apart`). Meshes of different ranks hold the
same rank numbers, so they would be equal. By mesh, torch remembers for the whole process what a redistribution does. If
shards are uneven that differs between ranks, and one rank would be served with what another one does. torch
distinguishes meshes by thread when the backend is its own "threaded" one. During a run rank threads appear to have that
backend, with a number for the thread that no other rank and no other run has. Afterwards these tables are emptied. Uses
the names get_backend and threading in torch.distributed.device_mesh, and caches of torch.distributed.tensor; where they
are missing, meshes of different ranks are equal.

torch.distributed.nn.functional is imported here because its functions take the world of the moment of their import as
the default group. No rank's world may be that.
"""

import concurrent.futures.thread as executors
import functools
import inspect
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import Thread, get_ident
from types import CellType, SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # noqa: F401
from torch import Tensor
from torch.distributed import _functional_collectives, device_mesh
from torch.distributed import distributed_c10d as c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from shardproof.harness.errors import RequestError
from shardproof.harness.torch_internals.lookup import lacking_error, replace_attribute

_Class = TypeVar("_Class", bound=type)
_PRIVATE_NAMES = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "start_coalescing": "_start_coalescing",
    "end_coalescing": "_end_coalescing",
    "source_rank": "_source_rank",
    "get_backend": "_get_backend",
    "device_types": "_device_types",
    "has_hooks": "_has_hooks",
}
"""Method or property -> the name under which torch calls it too: the flat ones up to 2.12, the others always."""


def answers_torch(kind: _Class) -> _Class:
    """A class decorator: methods of a group or a work also under the private names by which torch calls them."""
    for name, private in _PRIVATE_NAMES.items():
        if name in vars(kind):
            setattr(kind, private, vars(kind)[name])
    return kind


Pending = AsyncCollectiveTensor
"""The result of a functional collective under way. torch.distributed._functional_collectives.AsyncCollectiveTensor."""


FUNCTIONAL = _functional_collectives.__file__
"""The file of torch's functions of functional collectives, which hand out such results."""


def wait_pending(tensor: Tensor) -> Tensor:
    """The tensor; of a functional collective under way its result, waited for."""
    return tensor.trigger_wait() if isinstance(tensor, Pending) else tensor


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
    """What torch's `_World` holds for a process, here for one rank."""

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

    def read_of_thread(world: Any) -> Any:
        mine = world._ranks.get(get_ident())
        return of_process.__get__(world) if mine is None else getattr(mine, name)

    def write(world: Any, value: Any) -> None:
        mine = world._ranks.get(get_ident())
        if mine is None:
            of_process.__set__(world, value)
        else:
            setattr(mine, name, value)

    return property(read_of_thread, write)


@functools.cache
def _ranked_world() -> type:
    """The class of a world that answers a rank thread from its tables. Raises MachineError where torch lacks a part."""
    if missing := _missing_internals():
        raise lacking_error(_FEATURE, ", ".join(missing))
    kind: Any = c10d._World
    return type("RankedWorld", (kind,), {name: _of_thread(getattr(kind, name), name) for name in _TABLES})


def _missing_internals() -> list[str]:
    return [
        f"{getattr(owner, '__name__', owner)}.{name}"
        for owner, names in _NEEDED.items()
        for name in names.split()
        if not hasattr(owner, name)
    ]


@contextmanager
def by_thread() -> Iterator[dict[int, Any]]:
    """Within it threads have worlds of their own: the Tables in the dict that is yielded, by the thread's identity.

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
    """Within it this thread is the rank of these tables; groups that the rank makes later have no names in this thread.

    A backward stays in this thread, as on the rank's own thread. Afterwards the thread is what it was.
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


def own_groups(size: int) -> list[tuple[int, ...]]:
    """The ranks of the groups of this size that this process belongs to, in their order, each group once.

    Uses distributed_c10d._world.pg_group_ranks; where it is missing, there are none.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return []
    groups = getattr(c10d._world, "pg_group_ranks", {}).values()
    mine = (ranks for ranks in groups if len(ranks) == size and dist.get_rank() in ranks)
    return sorted({tuple(sorted(ranks, key=ranks.__getitem__)) for ranks in mine})


@contextmanager
def groups_made_by(maker: Callable[[Maker, inspect.BoundArguments], tuple[Any, Any]]) -> Iterator[None]:
    """Within it, below new_group and init_process_group, groups are made by maker(torch's own maker, arguments).

    The arguments have names: backend, group_name, global_ranks_in_group, group_size, and others. Uses
    distributed_c10d._new_process_group_helper. Raises MachineError where torch lacks it.
    """
    helper: Any = getattr(c10d, "_new_process_group_helper", None)
    if helper is None:
        raise lacking_error("making groups", "distributed_c10d._new_process_group_helper")

    @functools.wraps(helper)
    def make_group(*arguments: Any, **words: Any) -> Any:
        return maker(helper, _signature(helper).bind(*arguments, **words))

    with replace_attribute(c10d, "_new_process_group_helper", make_group):
        yield


@contextmanager
def redirect_function(function: Callable[..., Any], replacement: Callable[..., Any]) -> Iterator[None]:
    """In the body, `function` is `replacement`, which is given the original first. Raises MachineError if it cannot."""
    cells: tuple[CellType, ...] = getattr(function, "__closure__", None) or ()  # of torch's logging wrapper
    cell = next((one for one in cells if getattr(one.cell_contents, "__name__", "") == function.__name__), None)
    if cell is None:
        raise lacking_error("the world of an engine", f"wrapper that holds {function.__name__}")
    original = cell.cell_contents
    cell.cell_contents = functools.update_wrapper(functools.partial(replacement, original), original)
    try:
        yield
    finally:
        cell.cell_contents = original


_MESH_TABLES = {
    "torch.distributed.tensor._redistribute": ("_gen_transform_infos.cache_clear", "clear_redistribute_planner_cache"),
    "torch.distributed.tensor._collective_utils": ("MeshTopoInfo.build_from_mesh.cache_clear",),
}
_RANKS = 2**20
"""More ranks than any run has: the numbers of one run do not reach into another's."""


@contextmanager
def kept_apart(rank_of_thread: Callable[[], int | None]) -> Iterator[None]:
    """Within it the meshes that rank threads make differ. On other threads `rank_of_thread` returns None."""
    module: Any = device_mesh
    first = time.monotonic_ns() // 1000 % 2**40 * _RANKS
    get_backend, threads = getattr(module, "get_backend", None), getattr(module, "threading", None)
    if get_backend is None or threads is None:
        yield
        return

    def told_backend(*arguments: Any, **words: Any) -> Any:
        threaded = not arguments and not words and rank_of_thread() is not None
        return "threaded" if threaded else get_backend(*arguments, **words)

    def number_of_thread() -> int:
        rank = rank_of_thread()
        return threading.get_ident() if rank is None else first + rank

    module.get_backend = told_backend
    module.threading = SimpleNamespace(get_ident=number_of_thread, local=threading.local)
    try:
        yield
    finally:
        module.get_backend, module.threading = get_backend, threads
        _empty_tables()


def _empty_tables() -> None:
    for name, tables in _MESH_TABLES.items():
        for table in tables if name in sys.modules else ():
            target: Any = sys.modules[name]
            for part in table.split("."):
                target = getattr(target, part, None)
            if target is not None:
                target()
