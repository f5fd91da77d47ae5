"""Gloo connections kept from run to run: making them takes milliseconds and closing them 20, every run and group.

A run still has groups of its own, new to torch and to the program. Only the backend object inside them (connections and
a counter of calls) is the one that the same group of the same processes had before. Ranks that issued the same calls
agree on that counter; after a run that failed its processes are replaced.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed import distributed_c10d as c10d

from shardproof.harness.torch_internals.lookup import standing
from shardproof.harness.torch_internals.world import Maker, groups_made_by

_Key = tuple[str, int, tuple[int, ...]]


class KeptGroups:
    """The gloo backends of one process by the group's name, size and ranks, for as long as its peers stay the same."""

    def __init__(self, makes: Callable[[str, tuple[int, ...]], None]) -> None:
        """`makes(number, ranks)` is called for every numbered group that is made, with or without this rank."""
        self._makes = makes
        self._connection = -1
        self._backends: dict[_Key, Any] = {}
        self._wanted: _Key = ("", 0, ())
        self._kept = self._keeping(c10d.ProcessGroupGloo)

    def __len__(self) -> int:
        return len(self._backends)

    @contextmanager
    def used(self, connection: int) -> Iterator[None]:
        """Groups made in the body take the backends kept under this number; those of another one are closed."""
        if connection != self._connection:
            self._backends.clear()
            self._connection = connection

        def made(original: Maker, arguments: inspect.BoundArguments) -> tuple[Any, Any]:
            given = arguments.arguments
            name, ranks = given["group_name"], tuple(given["global_ranks_in_group"])
            self._wanted = (name, given["group_size"], ranks)
            if ranks and name.isdigit():
                self._makes(name, ranks)
            with standing(c10d, "ProcessGroupGloo", self._kept):
                return original(*arguments.args, **arguments.kwargs)

        with groups_made_by(made):
            yield

    def _keeping(keeper, gloo: Any) -> Any:  # noqa: N805  (the class below has its own self)
        """A class that replaces ProcessGroupGloo and makes each object once."""

        class Kept(gloo):
            def __new__(cls, *args: Any, **kwargs: Any) -> Any:
                return keeper._backends.get(keeper._wanted) or gloo.__new__(cls)

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                if keeper._wanted not in keeper._backends:
                    super().__init__(*args, **kwargs)
                    keeper._backends[keeper._wanted] = self

        return Kept
