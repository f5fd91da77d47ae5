"""Facts about a failure without a cause: which tensors agree with the truth and which do not, by kind."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from shardproof.harness.checking.measures.kinds import KIND_WORDS, kind_of
from shardproof.harness.checking.records import RecordedRun, Truth
from shardproof.harness.verdicts.facts import AgreementByKind, Counts


def find_agreement(
    run: RecordedRun, truth: Truth, wrong: Sequence[str], undecided: Collection[str] = ()
) -> AgreementByKind:
    """Which tensors agree with the truth and which do not, by kind; names that no check decides are in neither."""
    bad = [name for name in wrong if name in truth.tensors]
    good = {*run.tensors} & {*truth.tensors} - {*wrong} - {*undecided}
    every = _count_kinds(truth.tensors)

    def of_every(names: Iterable[str]) -> dict[str, Counts]:
        own = _count_kinds(names)
        return {kind: (own[kind], count) for kind, count in every.items() if own[kind]}

    return AgreementByKind(wrong=of_every(bad), right=of_every(good))


def _count_kinds(names: Iterable[str]) -> Counter[str]:
    return Counter(KIND_WORDS.get(kind, kind) for kind in map(kind_of, names))
