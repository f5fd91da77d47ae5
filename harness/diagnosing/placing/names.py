"""Which module of a subject is which of its truth, by the paths of both."""

from collections.abc import Sequence


def same_modules(mine: Sequence[str], theirs: Sequence[str]) -> dict[str, str]:
    """Paths of the truth -> those of the ranks: equal ones, then those whose common end is the longest for both."""
    pairs = {path: path for path in theirs if path in set(mine)}
    left, right = [p for p in theirs if p not in pairs], [p for p in mine if p not in pairs]
    for path in left:
        best = _best(path, right)
        if best and _best(best, left) == path:
            pairs[path] = best
    return pairs


def _best(path: str, others: Sequence[str]) -> str:
    """The one path with the longest common end, "" when there are several or none."""
    ends = {other: _common_end(path, other) for other in others}
    most = max(ends.values(), default=0)
    best = [other for other, length in ends.items() if length == most]
    return best[0] if most and len(best) == 1 else ""


def _common_end(one: str, other: str) -> int:
    pairs = zip(reversed(one.split(".")), reversed(other.split(".")), strict=False)
    return next((count for count, (a, b) in enumerate(pairs) if a != b), min(one.count("."), other.count(".")) + 1)
