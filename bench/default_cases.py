"""Finds the default cases: as little to run as a search finds that holds every legal pair of values of two words.

    python -m bench.default_cases --seconds 1200

The values are those of `reference.case.domains`, on meshes of up to 8 ranks. The everyday recipes are there whatever
they hold. A case for a missing pair is a known one with both values, changed as the rules propose
(`reference.case.repair`), and then in single words as long as that holds more (AETG: Cohen et al., IEEE TSE 23, 1997).
After that a few cases at a time are taken out and found anew; what costs less is kept. The list is written to
`reference/case/default_cases.txt`, from which another call goes on.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any

from bench.pairs.cases import cost, total
from bench.pairs.search import Search
from reference.case import Case
from reference.case.default_cases import FILE, line_of, lines
from reference.case.repair import Words, problem_of, words_of


def shortest(words: Words) -> Words:
    """The case with one step and as few layers as it may have."""
    words = {**words, "micro": words["micro"] if words["micro"] != 2 else 1}
    ways = ({**words, "steps": 1, "layers": layers} for layers in range(1, words["layers"]))
    return next((way for way in ways if not problem_of(way)), {**words, "steps": 1})


def finished(found: Sequence[Words], kept: Sequence[Words], domains: Mapping[str, Sequence[Any]]) -> list[Words]:
    """The cases with two steps and layers where a value would be in no such case otherwise, not even one of those that
    are kept.
    """
    longer = [_twice(words) for words in found]
    price = [cost(after) - cost(before) for before, after in zip(found, longer, strict=True)]
    held = [{(word, words[word]) for word in domains} for words in longer]
    done = {(w, words[w]) for words in kept for w in domains if words["steps"] > 1 and words["layers"] > 1}
    missing, chosen = set().union(*held) - done, set[int]()
    while missing:
        best = max(range(len(found)), key=lambda number: len(missing & held[number]) / price[number])
        chosen.add(best)
        missing -= held[best]
    for number in sorted(chosen, key=lambda number: -price[number]):
        others = set().union(done, *(held[other] for other in chosen - {number}))
        chosen -= {number} if held[number] <= others else set()
    return [longer[number] if number in chosen else words for number, words in enumerate(found)]


def _twice(words: Words) -> Words:
    ways = ({**words, "steps": 2, "layers": layers} for layers in range(max(2, words["layers"]), 9))
    return next((way for way in ways if not problem_of(way)), {**words, "steps": 2})


def main() -> int:
    """Search for so many seconds, and write the list down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600, help="how long to search")
    parser.add_argument("--seed", type=int, default=0, help="another seed goes other ways")
    asked = parser.parse_args()
    end = time.monotonic() + asked.seconds
    kept, before = ([words_of(case) for case in lines()[section]] for section in ("recipes", "pairs"))
    search = Search(kept, asked.seed)
    search.begin([*kept, *before])
    found = search.without_idle(search.completed([shortest(words) for words in before]))
    while time.monotonic() < end:
        found = search.cheaper(found)
        print(f"\r{len(found)} cases, cost {total(found):.2f}", end="", flush=True)
    _write(finished(found, kept, search.domains))
    return 0


def _write(found: Sequence[Words]) -> None:
    by_hand = FILE.read_text(encoding="utf-8").partition("\npairs:\n")[0]
    new = sorted(line_of(Case(**words)) for words in found)
    FILE.write_text("\n".join([by_hand, "pairs:", *new, ""]), encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
