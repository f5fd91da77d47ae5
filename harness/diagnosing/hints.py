"""Words of a failure where no cause fits: which tensors agree with the truth and which do not, by their kinds."""

from collections import Counter
from collections.abc import Collection, Sequence

from shardproof.harness.checking.measures.kinds import KIND_WORDS, kind_of
from shardproof.harness.checking.records import Run, Truth


def agreement(run: Run, truth: Truth, wrong: Sequence[str], undecided: Collection[str] = ()) -> str:
    """Which tensors agree with the truth and which do not, by their kinds; "" where none is decided.

    Names that no check decides are in neither.
    """
    bad = [name for name in wrong if name in truth.tensors]
    good = {*run.tensors} & {*truth.tensors} - {*wrong} - {*undecided}
    of, right, off = (
        Counter(KIND_WORDS.get(kind, kind) for kind in map(kind_of, n)) for n in (truth.tensors, good, bad)
    )
    sides = (("wrong", off), ("right", right))
    parts = [
        f"{side}: {', '.join(f'{kind} {count[kind]} of {of[kind]}' for kind in of if count[kind])}"
        for side, count in sides
        if count
    ]
    return "; ".join(parts)
