"""A world of torch.distributed for every rank thread: default group, groups and names, seen by unmodified code.

For the time of a run rank threads have tables of their own (harness.torch_internals.world), and three functions are
redirected for them. They are init_process_group (the world exists: it is handed out when the sizes agree), split_group,
and the maker of groups below new_group. The first two are redirected inside torch's own wrappers, so a name that user
code imported earlier is redirected as well.

os.environ is every rank's own too, with the words that a launcher would give it. A change of a rank is passed on to the
C library too, as os.environ does, so that libraries see it. At the end of the run the process has what it had. The
launcher's words themselves are Python's alone: getenv in C has no ranks.
"""

import functools
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from shardproof.harness.engines.rank_environment import environment_of, meeting_place, require_own_world
from shardproof.harness.engines.threads.matcher import CollectiveMatcher
from shardproof.harness.engines.threads.process_group import InprocGroup
from shardproof.harness.engines.threads.rank_threads import follow_threads
from shardproof.harness.torch_internals.world import (
    Maker,
    Tables,
    by_thread,
    group_of_ranks,
    groups_made_by,
    kept_apart,
    rank_tables,
    redirect_function,
    register,
)

OwnWords = dict[str, str | None]
"""The environment variables of a rank that differ from the process's; None for those that the rank has deleted."""
_Environ: Any = type(os.environ)


class _RankedEnviron(_Environ):
    """The process's environment, with variables of its own for each rank."""

    _of_thread: Callable[[], OwnWords | None]
    _changed: set[str]

    def __getitem__(self, word: str) -> str:
        own = self._of_thread()
        if own is None or word not in own:
            found: str = super().__getitem__(word)
            return found
        if (value := own[word]) is None:
            raise KeyError(word)
        return value

    def __setitem__(self, word: str, value: str) -> None:
        own = self._of_thread()
        if own is None:
            super().__setitem__(word, value)
            return
        os.putenv(self.encodekey(word), self.encodevalue(value))  # refuses what is no text
        self._changed.add(word)
        own[word] = value

    def __delitem__(self, word: str) -> None:
        own = self._of_thread()
        if own is None:
            super().__delitem__(word)
            return
        self[word]  # raises KeyError
        os.unsetenv(self.encodekey(word))
        self._changed.add(word)
        own[word] = None

    def __iter__(self) -> Iterator[str]:
        own = self._of_thread() or {}
        yield from (word for word in list(super().__iter__()) if word not in own)
        yield from (word for word, value in list(own.items()) if value is not None)

    def __len__(self) -> int:
        return sum(1 for _word in self)


@contextmanager
def environ_by_rank(of_thread: Callable[[], OwnWords | None]) -> Iterator[None]:
    """Inside, os.environ answers each thread with the variables that `of_thread` returns; None: with the process's."""
    environ: Any = os.environ
    environ._of_thread, environ._changed = of_thread, set()
    environ.__class__ = _RankedEnviron
    try:
        yield
    finally:
        environ.__class__ = _Environ
        changed = environ.__dict__.pop("_changed")
        del environ._of_thread
        for word in changed:
            if word in environ:
                os.putenv(word, environ[word])
            else:
                os.unsetenv(word)


Enter = Callable[[CollectiveMatcher, int, int], None]
_BACKEND = "gloo"
"""Result of get_backend: user code then takes the paths that it would take on CPU ranks."""
_BACKEND_CONFIG = str(c10d.BackendConfig(c10d.Backend(_BACKEND)))


@dataclass(slots=True, eq=False, kw_only=True)
class _Rank(Tables):
    """Tables of one rank, its matcher, store and environment; `life` counts its default groups."""

    matcher: CollectiveMatcher
    rank: int
    world_size: int
    store: Any
    environ: OwnWords
    life: int = 0
    adopted: bool = False


@contextmanager
def install_worlds() -> Iterator[Enter]:
    """Rank threads have their own worlds. Yields the function that each calls first: enter(matcher, rank, world_size).

    Raises RequestError when another run is active in this process, MachineError when this torch cannot do it.
    """
    meet_at = meeting_place(os.environ)
    with ExitStack() as undo:
        ranks = undo.enter_context(by_thread())
        undo.enter_context(redirect_function(c10d.init_process_group, _init_process_group))
        undo.enter_context(redirect_function(c10d.split_group, _split_group))
        undo.enter_context(groups_made_by(_new_group))
        undo.enter_context(kept_apart(lambda: getattr(_rank_of_thread(), "rank", None)))
        undo.enter_context(follow_threads(lambda mine: mine.matcher.scheduler.hand_back(mine.rank)))
        undo.enter_context(environ_by_rank(lambda: getattr(_rank_of_thread(), "environ", None)))
        yield functools.partial(_enter_world, ranks, dist.HashStore(), meet_at)


def _enter_world(
    ranks: dict[int, Any], store: Any, meet_at: dict[str, str], matcher: CollectiveMatcher, rank: int, world_size: int
) -> None:
    environ: OwnWords = dict(environment_of(rank, world_size, meet_at))
    mine = _Rank(matcher=matcher, rank=rank, world_size=world_size, store=store, environ=environ)
    ranks[get_ident()] = mine
    _make_default(mine)


def _rank_of_thread() -> _Rank | None:
    mine: _Rank | None = rank_tables()
    return mine


def leave_uninitialised() -> None:
    """The calling rank, which has made no call, finds no default group until it calls init_process_group."""
    dist.destroy_process_group()
    mine = _rank_of_thread()
    if mine is not None:
        mine.life = 0


def _make_default(mine: _Rank) -> None:
    """The default group. After destroy_process_group it has a new life, matched only with the same
    life of other ranks.
    """
    mine.life += 1
    mine.group_count = 1
    ranks = tuple(range(mine.world_size))
    mine.default_pg = _make_group(mine, "0", ranks, "default_pg")
    mine.pg_group_ranks[mine.default_pg] = {rank: rank for rank in ranks}


def _make_group(mine: _Rank, name: str, ranks: tuple[int, ...], description: str, tag: str = "") -> InprocGroup:
    """Make a rank's process group, and enter it in its tables as torch would."""
    group = mine.matcher.group(mine.life, name, ranks, description)
    if group.store is None:
        group.store = c10d.PrefixStore(f"{mine.life}/{name}/", mine.store)
    made = InprocGroup(mine.matcher, group, ranks.index(mine.rank), name)
    mine.pg_map[made] = (_BACKEND, group.store)
    mine.pg_names[made] = name
    mine.pg_backend_config[made] = _BACKEND_CONFIG
    register(name, made)
    if not tag:
        mine.tags_to_pg.setdefault("", []).append(made)
    mine.pg_to_tag[made] = f"user:{tag}" if tag else f"ptd:{name}"
    mine.tags_to_pg.setdefault(mine.pg_to_tag[made], []).append(made)
    return made


def _new_group(original: Maker, arguments: inspect.BoundArguments) -> tuple[Any, Any]:
    """Replaces torch's maker of groups: (group, its store), or (NON_GROUP_MEMBER, None) for ranks outside of it."""
    mine, given = _rank_of_thread(), arguments.arguments
    if mine is None or str(given["backend"]) == "fake":
        return original(*arguments.args, **arguments.kwargs)
    ranks, name, tag = tuple(given["global_ranks_in_group"]), given["group_name"], given.get("pg_tag") or ""
    if tag and (known := group_of_ranks(tag, ranks)):
        return known, mine.pg_map[known][1]
    if name.isdigit():  # numbered: every rank of the world makes the same groups in the same order
        mine.matcher.agree_on_group(mine.rank, mine.life, int(name), ranks)
    if mine.rank not in ranks:
        return dist.GroupMember.NON_GROUP_MEMBER, None
    _require_known(str(given["backend"] or ""))
    made = _make_group(mine, name, ranks, given.get("group_desc") or "undefined", tag)
    return made, mine.pg_map[made][1]


def _require_known(backend: str) -> None:
    """Raises AssertionError, as torch does, for a name that is no backend's; "cpu:gloo,cuda:nccl" names two."""
    for part in filter(None, backend.split(",")):
        if (name := part.rpartition(":")[2].lower()) not in dist.Backend.backend_list:
            raise AssertionError(f"Unknown backend type {name}; legal: {_BACKEND}")


def _init_process_group(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """On a rank: hand out the existing world, or a new one if that was destroyed. Raises ValueError for another size or
    rank, and for a second call.
    """
    mine = _rank_of_thread()
    if mine is None:
        return original(*args, **kwargs)
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    require_own_world(given, mine.rank, mine.world_size, "thread")
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
    mine = _rank_of_thread()
    if mine is None:
        return original(parent_pg, split_ranks, timeout, pg_options, group_desc, **kwargs)
    parent = parent_pg or mine.default_pg
    members = dist.get_process_group_ranks(parent)
    flat = [rank for split in split_ranks or () for rank in split]
    once_each = len(set(flat)) == len(flat) and set(flat) <= set(range(len(members)))
    if not (split_ranks and all(split_ranks) and once_each):
        rule = f"must be lists of distinct ranks below {len(members)}, none of them empty"
        raise ValueError(f"split_group split_ranks={split_ranks}: {rule}; legal: [[0], [1]]")
    parent.splits += 1
    own = next((sorted(split) for split in split_ranks if members.index(mine.rank) in split), None)
    if own is None:
        return None
    ranks = tuple(members[rank] for rank in own)
    name = f"{parent.group_name}:split:{parent.splits}"
    made = _make_group(mine, name, ranks, group_desc or f"{parent.group_desc}:split:{parent.splits}")
    mine.pg_group_ranks[made] = {rank: i for i, rank in enumerate(ranks)}
    return made
