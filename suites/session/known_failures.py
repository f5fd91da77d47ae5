"""Tests that are known to fail, with reasons: they may fail and nothing else, and one that passes again fails.

[[failure]]
test = "test_forward.py::test_losses_and_logits[isp]"     # the end of a test's id; * stands for anything
reason = "issue 12: the head is scattered in the wrong order"

Summary of a test session on GitHub: counts, and the six lines of every failure, within a step's limit of length.
"""

import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardproof.harness.errors import RequestError

_LEGAL = 'legal: [[failure]] with test = "test_forward.py::test_losses_and_logits[isp]" and reason = "issue 12"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """An entry: the end of the ids of the tests that it means, and why they fail."""

    test: str
    reason: str

    def means(self, nodeid: str) -> bool:
        """Whether the entry means the test with this id."""
        pattern = re.escape(self.test).replace(r"\*", ".*")
        return re.fullmatch(f"(.*/)?{pattern}", nodeid) is not None


def read_known_failures(path: Path) -> tuple[Known, ...]:
    """The entries of a file; none when there is no file. Raises RequestError with one sentence for any other file."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else f"no TOML: {problem}"
        raise RequestError(f"known-failures={path}: cannot be read ({reason}); {_LEGAL}") from problem
    entries = content.get("failure", [])
    if set(content) - {"failure"} or not isinstance(entries, list):
        raise RequestError(f"known-failures={path}: holds {', '.join(content)}, must hold [[failure]] only; {_LEGAL}")
    return tuple(_parse_known(path, entry) for entry in entries)


def _parse_known(path: Path, entry: object) -> Known:
    words = entry if isinstance(entry, dict) else {}
    if set(words) != {"test", "reason"} or not all(isinstance(word, str) and word.strip() for word in words.values()):
        raise RequestError(f"known-failures={path}: {entry!r} must have a test and a reason, nothing else; {_LEGAL}")
    return Known(test=words["test"], reason=words["reason"])


def mark(
    session: pytest.Session,
    items: list[pytest.Item],
    known: Sequence[Known],
    claimed: Collection[str],
    chosen: Collection[str],
) -> None:
    """Let known failures fail; add a failing test for every entry that matches no collected test.

    Such an entry is stale only if the file that it names was collected as a whole, and if its mode, if any, is not one
    of those that the subject has `claimed` but that were not `chosen`.
    """
    for item in items:
        for entry in known:
            if _means(entry, item):
                item.add_marker(pytest.mark.xfail(reason=entry.reason, strict=True))
    left_out = set(claimed) - set(chosen)
    items += list(_stale(session, items, [entry for entry in known if _mode(entry, claimed) not in left_out]))


def _means(entry: Known, item: pytest.Item) -> bool:
    """Whether an entry means a test: by its id, or by its path, since ids lack the file if pytest ran elsewhere."""
    _, colons, test = item.nodeid.partition("::")
    return entry.means(item.nodeid) or entry.means(f"{item.path.as_posix()}{colons}{test}")


def _mode(entry: Known, modes: Collection[str]) -> str:
    """The mode in an entry's parameters, as in [isp], [isp-max all_reduce] or [mode=isp tp=2]; "" if there is none."""
    longest_first = "|".join(sorted(map(re.escape, modes), key=len, reverse=True))
    found = re.search(rf"(?:^|mode=|-)({longest_first})(?=$|[ -])", entry.test.partition("[")[2].rstrip("]"))
    return found[1] if found else ""


def _stale(session: pytest.Session, items: Sequence[pytest.Item], known: Sequence[Known]) -> Iterator[pytest.Item]:
    if any("::" in word for word in session.config.args):
        return
    files = {item.path.name for item in items}
    for entry in known:
        file = Path(entry.test.partition("::")[0]).name
        if (file in files or "*" in file) and not any(_means(entry, item) for item in items):
            yield _Stale.from_parent(session, name=f"known failure {entry.test}", entry=entry)


class _Stale(pytest.Item):
    """A known failure of a test that does not exist."""

    def __init__(self, *, entry: Known, **words: object) -> None:
        super().__init__(**words)  # type: ignore[arg-type]
        self.entry = entry

    def runtest(self) -> None:
        raise RequestError(f"known failure {self.entry.test}: no such test is left; legal: remove it from the file")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: object = None) -> str:
        return str(excinfo.value)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name


_MOST_BYTES = 900_000
"""GitHub drops a step's summary above 1 MiB."""


def summary_markdown(counts: Mapping[str, int], failures: Sequence[tuple[str, str]], about: str) -> str:
    """Markdown: a line of counts, then every failed test with its message, as many as fit."""
    words = ", ".join(f"{count} {word}" for word, count in counts.items() if count) or "no test"
    text = f"### shardproof: {words}\n\n{about}\n\n"
    for number, (test, message) in enumerate(failures):
        fence = "~" * 8
        part = f"<details><summary>{_plain(test)}</summary>\n\n{fence}\n{message.strip()}\n{fence}\n\n</details>\n\n"
        if len((text + part).encode()) > _MOST_BYTES:
            return f"{text}{len(failures) - number} more failures are in the log.\n"
        text += part
    return text


def _plain(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("\n", " ")


def append_summary(text: str, environment: Mapping[str, str]) -> bool:
    """Append the text to the step's page if the environment names one. Returns whether it did."""
    target = environment.get("GITHUB_STEP_SUMMARY", "")
    if not target:
        return False
    with Path(target).open("a", encoding="utf-8") as page:
        page.write(text)
    return True
