"""A world of torch.distributed for every rank thread: default group, groups and names, seen by unmodified code.

torch keeps its groups in one object (`distributed_c10d._world`) and one registry of names. For the time of a run the
object's class is changed to one that answers each rank thread from that rank's own tables and every other thread as
before, and the registry is kept per thread. Four functions are redirected for rank threads: init_process_group (the
world exists: it is handed out when the sizes agree), split_group, and the makers of groups below new_group. The first
two are redirected inside torch's own wrappers, so a name that user code imported earlier is redirected as well.

Everything torch-private that this needs is looked up at import; ImportError lists what is missing. RANK, WORLD_SIZE and
the like are environment variables of the one process: they are the same for all ranks and not read here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from harness.engines.exchange import Exchange
from harness.engines.inproc_group import InprocGroup
from harness.engines.rank_meshes import kept_apart
from harness.engines.redirect import redirected
from harness.errors import RequestError

__all__ = ["Enter", "installed", "leave"]

_registry: Any = torch._C._distributed_c10d
Enter = Callable[[Exchange, int, int], None]
_TABLES = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag", "pg_coalesce_state")
_NEEDED = {
    c10d: "_world _World _new_process_group_helper init_process_group split_group PrefixStore Backend BackendConfig",
    _registry: "_register_process_group _unregister_all_process_groups _set_thread_isolation_mode HashStore",
    torch._C: "_AutoDispatchBelowAutograd _DisableTorchDispatch _len_torch_dispatch_stack _len_torch_function_stack",
    torch: "_foreach_copy_",
}
_BACKEND = "gloo"
"""What get_backend says: user code then takes the paths that it would take on CPU ranks."""


_BACKEND_CONFIG = str(c10d.BackendConfig(c10d.Backend(_BACKEND)))


@dataclass(slots=True, eq=False)
class _Rank:
    """One rank's tables, as torch's `_World` holds them for a process."""

    exchange: Exchange
    rank: int
    world_size: int
    store: Any
    default_pg: Any = None
    group_count: int = 0
    life: int = 0
    adopted: bool = False
    comms: list[Any] = field(default_factory=list)
    pg_map: dict[Any, Any] = field(default_factory=dict)
    pg_names: dict[Any, Any] = field(default_factory=dict)
    pg_group_ranks: dict[Any, Any] = field(default_factory=dict)
    pg_backend_config: dict[Any, Any] = field(default_factory=dict)
    tags_to_pg: dict[Any, Any] = field(default_factory=dict)
    pg_to_tag: dict[Any, Any] = field(default_factory=dict)
    pg_coalesce_state: dict[Any, Any] = field(default_factory=dict)


class _RankedWorld(c10d._World):
    """torch's world, answering a rank thread from that rank's tables."""

    _ranks: dict[int, _Rank]

    @property
    def default_pg(self) -> Any:
        mine = self._ranks.get(get_ident())
        return self._default_pg if mine is None else mine.default_pg

    @default_pg.setter
    def default_pg(self, group: Any) -> None:
        mine = self._ranks.get(get_ident())
        if mine is None:
            self._default_pg = group
        else:
            mine.default_pg = group

    @property
    def group_count(self) -> int:
        mine = self._ranks.get(get_ident())
        return c10d._group_count if mine is None else mine.group_count

    @group_count.setter
    def group_count(self, count: int) -> None:
        mine = self._ranks.get(get_ident())
        if mine is None:
            c10d._group_count = count
        else:
            mine.group_count = count


def _table(name: str) -> property:
    """A table of `_World` that a rank thread has to itself."""
    of_process = getattr(c10d._World, name).fget

    def read(world: _RankedWorld) -> Any:
        mine = world._ranks.get(get_ident())
        return of_process(world) if mine is None else getattr(mine, name)

    return property(read)


for _name in _TABLES:
    setattr(_RankedWorld, _name, _table(_name))


@contextmanager
def installed() -> Iterator[Enter]:
    """Rank threads have their own worlds. Yields what each calls first: enter(exchange, rank, world_size).

    Raises RequestError when another run is active in this process.
    """
    world: Any = c10d._world
    if isinstance(world, _RankedWorld):
        raise RequestError("run: another in-process run is active in this process; legal: one run at a time")
    torch_world = type(world)
    world._ranks = {}
    with ExitStack() as undo:
        undo.callback(world.__dict__.pop, "_ranks")
        world.__class__ = _RankedWorld
        undo.callback(setattr, world, "__class__", torch_world)
        _registry._set_thread_isolation_mode(True)
        undo.callback(_registry._set_thread_isolation_mode, False)
        undo.enter_context(redirected(c10d.init_process_group, _init_process_group))
        undo.enter_context(redirected(c10d.split_group, _split_group))
        helper = c10d._new_process_group_helper
        undo.callback(setattr, c10d, "_new_process_group_helper", helper)
        c10d._new_process_group_helper = _standing_for(helper, _new_group)
        undo.enter_context(kept_apart(_rank_of_thread))
        yield functools.partial(_enter, _registry.HashStore())


def leave() -> None:
    """A rank thread ends: forget its world and its names."""
    ranks = getattr(c10d._world, "_ranks", {})
    if ranks.pop(get_ident(), None) is not None:
        _registry._unregister_all_process_groups()


def _enter(store: Any, exchange: Exchange, rank: int, world_size: int) -> None:
    world: Any = c10d._world
    world._ranks[get_ident()] = mine = _Rank(exchange=exchange, rank=rank, world_size=world_size, store=store)
    _make_default(mine)


def _mine() -> _Rank | None:
    ranks = getattr(c10d._world, "_ranks", None)
    return None if ranks is None else ranks.get(get_ident())


def _rank_of_thread() -> int | None:
    mine = _mine()
    return None if mine is None else mine.rank


def _make_default(mine: _Rank) -> None:
    """The default group; after destroy_process_group a new life of it, which meets only its own kind."""
    mine.life += 1
    mine.group_count = 1
    ranks = tuple(range(mine.world_size))
    mine.default_pg = _make(mine, "0", ranks, "default_pg")
    mine.pg_group_ranks[mine.default_pg] = {rank: rank for rank in ranks}


def _make(mine: _Rank, name: str, ranks: tuple[int, ...], description: str, tag: str = "") -> InprocGroup:
    """One rank's process group, entered in its tables as torch enters one."""
    group = mine.exchange.group(mine.life, name, ranks, description)
    if group.store is None:
        group.store = c10d.PrefixStore(f"{mine.life}/{name}/", mine.store)
    made = InprocGroup(mine.exchange, group, ranks.index(mine.rank), name)
    mine.pg_map[made] = (_BACKEND, group.store)
    mine.pg_names[made] = name
    mine.pg_backend_config[made] = _BACKEND_CONFIG
    _registry._register_process_group(name, made)
    if not tag:
        mine.tags_to_pg.setdefault("", []).append(made)
    mine.pg_to_tag[made] = f"user:{tag}" if tag else f"ptd:{name}"
    mine.tags_to_pg.setdefault(mine.pg_to_tag[made], []).append(made)
    return made


def _new_group(original: Callable[..., tuple[Any, Any]], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Stands for torch's _new_process_group_helper: (group, its store), (NON_GROUP_MEMBER, None) outside of it."""
    mine = _mine()
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    if mine is None or str(given["backend"]) == "fake":
        return original(*args, **kwargs)
    ranks, name, tag = tuple(given["global_ranks_in_group"]), given["group_name"], given.get("pg_tag") or ""
    if tag and (known := c10d._find_pg_by_ranks_and_tag(tag, list(ranks))):
        return known, mine.pg_map[known][1]
    if name.isdigit():  # numbered: every rank of the world makes the same groups in the same order
        mine.exchange.agree_on_group(mine.rank, mine.life, int(name), ranks)
    if mine.rank not in ranks:
        return dist.GroupMember.NON_GROUP_MEMBER, None
    made = _make(mine, name, ranks, given.get("group_desc") or "undefined", tag)
    return made, mine.pg_map[made][1]


def _init_process_group(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """On a rank: hand out the world that exists. Raises ValueError for another size or rank, and for a second call."""
    mine = _mine()
    if mine is None:
        return original(*args, **kwargs)
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    for name, value, own in (
        ("world_size", given.get("world_size", -1), mine.world_size),
        ("rank", given.get("rank", -1), mine.rank),
    ):
        if value not in {-1, own}:
            rule = f"the engine runs this thread as rank {mine.rank} of {mine.world_size}"
            raise ValueError(f"init_process_group {name}={value}: {rule}; legal: {name}={own}, or leave it out")
    if mine.default_pg is None:
        _make_default(mine)
    elif mine.adopted:
        raise ValueError("trying to initialize the default process group twice!")
    mine.adopted = True
    return None


def _split_group(
    original: Callable[..., Any],
    parent_pg: Any = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: Any = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    **kwargs: Any,
) -> Any:
    """On a rank: the group of its split, None in no split. Ranks count within the parent. Raises ValueError."""
    mine = _mine()
    if mine is None:
        return original(parent_pg, split_ranks, timeout, pg_options, group_desc, **kwargs)
    parent = parent_pg or mine.default_pg
    members = dist.get_process_group_ranks(parent)
    flat = [rank for split in split_ranks or () for rank in split]
    if (
        not split_ranks
        or not all(split_ranks)
        or len(set(flat)) != len(flat)
        or not set(flat) <= set(range(len(members)))
    ):
        rule = f"must be lists of distinct ranks below {len(members)}, none of them empty"
        raise ValueError(f"split_group split_ranks={split_ranks}: {rule}; legal: [[0], [1]]")
    parent.splits += 1
    own = next((sorted(split) for split in split_ranks if members.index(mine.rank) in split), None)
    if own is None:
        return None
    ranks = tuple(members[rank] for rank in own)
    name = f"{parent.group_name}:split:{parent.splits}"
    made = _make(mine, name, ranks, group_desc or f"{parent.group_desc}:split:{parent.splits}")
    mine.pg_group_ranks[made] = {rank: i for i, rank in enumerate(ranks)}
    return made


def _standing_for(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    """The replacement, which is given the original first, under the original's name."""
    return functools.update_wrapper(functools.partial(replacement, original), original)


def _missing() -> list[str]:
    return [
        f"{owner.__name__}.{name}"
        for owner, names in _NEEDED.items()
        for name in names.split()
        if not hasattr(owner, name)
    ]


if _missing():
    raise ImportError(
        f"the in-process engine needs torch 2.11 to 2.13; torch {torch.__version__} lacks {', '.join(_missing())}"
    )
