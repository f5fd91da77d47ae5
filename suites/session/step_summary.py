"""Summary of a test session on GitHub: counts, and the six lines of every failure, within a step's limit of length."""

from collections.abc import Mapping, Sequence
from pathlib import Path

_MOST_BYTES = 900_000
"""GitHub drops a step's summary above 1 MiB."""


def markdown(counts: Mapping[str, int], failures: Sequence[tuple[str, str]], about: str) -> str:
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


def append(text: str, environment: Mapping[str, str]) -> bool:
    """Append it to the step's page when the environment names one; say whether it did."""
    target = environment.get("GITHUB_STEP_SUMMARY", "")
    if not target:
        return False
    with Path(target).open("a", encoding="utf-8") as page:
        page.write(text)
    return True
