"""Process-wide state that every rank of the in-process engine has to itself: swapped at every change of turns.

Random streams (torch's CPU generator, Python's `random`, numpy's global stream), the default dtype, and the state of
modules that the request names (`module_state`). Swapping is sound only because one rank runs at a time. Not swapped, so
shared by ranks: the working folder, CUDA generators, the state of other modules. The environment is asked by thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from harness.engines.threads.state.module_state import Namespace, own
from harness.engines.threads.state.rng_streams import CallerStreams, RankStreams


class PerRankState:
    """The private state of `world_size` ranks. `leave` and `enter` frame a change of turns; `restore` ends the run.

    Every rank starts from `seed`, the caller's default dtype, and what the places of modules have now.
    """

    def __init__(self, world_size: int, seed: int, places: Sequence[Namespace], caller: CallerStreams) -> None:
        self._places = tuple(places)
        self._caller = caller
        self._callers_dtype = torch.get_default_dtype()
        self._callers_names = [place.read() for place in self._places]
        caller.keep()
        self._streams = RankStreams(world_size, seed)
        self._dtypes = [torch.get_default_dtype()] * world_size
        self._names = [own(self._places) for _ in range(world_size)]
        self._holder = -1

    def enter(self, rank: int) -> None:
        """Make the process's state this rank's."""
        if self._holder == rank:
            return
        self._holder = rank
        if self._dtypes[rank] is not torch.get_default_dtype():
            torch.set_default_dtype(self._dtypes[rank])
        if not self._streams.clean:
            self._streams.enter(rank)
        if self._places:
            for place, mine in zip(self._places, self._names[rank], strict=True):
                place.write(mine)

    def leave(self, rank: int) -> None:
        """Keep the process's state as this rank's."""
        self._dtypes[rank] = torch.get_default_dtype()
        self._streams.leave(rank)
        if self._places:
            self._names[rank] = [place.read() for place in self._places]

    def end(self, rank: int) -> None:
        """The rank has finished: only whether it has drawn still matters."""
        self._streams.leave(rank)

    @property
    def drew(self) -> bool:
        """Whether any rank drew from a random stream of the process, or seeded one."""
        return not self._streams.clean

    def restore(self) -> None:
        """Make the process's state the caller's again."""
        if self._callers_dtype is not torch.get_default_dtype():
            torch.set_default_dtype(self._callers_dtype)
        self._caller.give_back(self._streams)
        for place, was in zip(self._places, self._callers_names, strict=True):
            place.write(was)
