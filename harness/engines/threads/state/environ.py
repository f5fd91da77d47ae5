"""os.environ of ranks that are threads: each reads its launcher's words, and changes of one are not seen by another.

A change of a rank is passed on to the C library too, as os.environ does, so that libraries see it. At the end of the
run the process has what it had. The launcher's words themselves are Python's alone: getenv in C has no ranks.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

OwnWords = dict[str, str | None]
"""Words of a rank's environment beside the process's: word -> value, None where the rank has deleted it."""
_Environ: Any = type(os.environ)


class _RankedEnviron(_Environ):
    """The process's environment, in which a rank has words of its own."""

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
    """Within it os.environ answers each thread with the words that `of_thread` gives it; None: with the process's."""
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
