"""The request of a run: cases, subject, engine, and other options of a command, checked without torch."""

import math
import shlex
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardproof.harness.dense_model import in_own_words
from shardproof.harness.errors import RequestError
from shardproof.harness.protocols import CaseLike
from shardproof.harness.subject import NamedSubject

_WEEK_S = 604800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Request of a run: these cases of a subject on an engine, whose ranks compute on a device.

    The run folder is made in `out`, which the user called `asked_out`. `timeout_s` bounds each run of a case and each
    dense model. `command` goes to env.json. `profile` names the tools (torch, nsys) under which every case is run once
    more as a witness of its ledger; they watch `profile_steps` of that run, None for all. `processes` is the number of
    forked processes that prove cases in place of this one, so that a case that ends its process ends no other. With
    `fail_fast` the first case that neither passes nor is skipped is the last. `when_s` is how long the words that one
    failure needs are looked for; all failures together get three times as long, and 0 means not at all. With a
    `repeat_every` of 3 every third case is run twice, to compare its two runs.
    """

    cases: tuple[CaseLike, ...]
    subject: NamedSubject
    engine: str = "inproc"
    device: str = "cpu"
    out: Path = Path("runs")
    asked_out: str = "runs"
    timeout_s: float = 60.0
    command: tuple[str, ...] = ()
    profile: tuple[str, ...] = ()
    profile_steps: range | None = None
    processes: int = 0
    fail_fast: bool = False
    when_s: float = 0.0
    repeat_every: int = 1

    def repeats(self, case: CaseLike) -> bool:
        """Whether this case is run twice."""
        return self.repeat_every == 1 or case in self.cases[:: self.repeat_every]

    @property
    def options(self) -> str:
        """The further words of a command that repeats a case as it was run here."""
        limit = (f"{self.timeout_s:g}", "60")
        words = {"--engine": (self.engine, "inproc"), "--device": (self.device, "cpu"), "--timeout": limit}
        words["--out"] = (self.asked_out, "runs")
        return " ".join(f"{word} {shlex.quote(value)}" for word, (value, usual) in words.items() if value != usual)


def seconds(text: str, word: str, legal: str = "60") -> float:
    """The seconds of an option called `word`. Raises RequestError unless it is a number above 0 and at most a week.

    `legal` is the value that the message suggests; if it is 0, 0 is allowed.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (0 < number <= _WEEK_S or number == float(legal) == 0):
        rule = f"must be a number of seconds {'from' if legal == '0' else 'above'} 0 and at most {_WEEK_S:.0f}"
        raise RequestError(f"{word}={text}: {rule}; legal: --{word} {legal}")
    return number


def check_saved(cases: Iterable[CaseLike]) -> None:
    """Raise RequestError for the first case whose folder for checkpoints cannot be written. Leaves no new folder."""
    saved = {folder_of(case, "save") for case in cases}
    for word in sorted(saved - {""}):
        folder = Path(word)
        fresh = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as problem:
            reason = "it is a file" if folder.exists() and not folder.is_dir() else problem.strerror or str(problem)
            legal = "a folder with write permission, such as save=checkpoint"
            raise RequestError(f"save={word}: cannot be written ({reason}); legal: {legal}") from problem
        finally:
            for path in fresh:
                with suppress(OSError):
                    path.rmdir()


def loading_what_exists(cases: Sequence[CaseLike]) -> list[CaseLike]:
    """The cases without those that load a checkpoint which one of the cases saves."""
    saved = {folder_of(case, "save") for case in cases} - {""}
    return [case for case in cases if folder_of(case, "load") not in saved]


def folder_of(case: CaseLike, word: str) -> str:
    """The folder that a case saves to or loads from, "" for none."""
    return "" if in_own_words(case) else str(getattr(case, word, ""))
