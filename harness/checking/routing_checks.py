"""The check of choices of experts (`routing/<step>/<module>`): maps [.., tokens, experts], exact, before any number.

    replicas    ranks that hold the same tokens choose the same experts for them, whether there is a truth or not
    truth       every token goes where the dense model sends it, unless that returns no maps or took those of the ranks

A router decides for each token by itself, so all copies of a token must go to the same experts. Otherwise all numbers
that follow would be those of two different models.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shardproof.harness.checking.finding import Finding
from shardproof.harness.checking.measures.kinds import kind_of
from shardproof.harness.checking.numeric_checks import make_numeric_check
from shardproof.harness.checking.records import Claims, RecordedRun, Truth
from shardproof.harness.outcome.merging import same_bits
from shardproof.harness.verdicts.facts import Fact, note_unchecked, notes_about, state_fact
from shardproof.harness.verdicts.verdict import FAIL, PASS, UNKNOWN

KIND = "routing"
_compared = make_numeric_check(KIND)


def check_routing(run: RecordedRun, truth: Truth, claims: Claims) -> Finding | None:
    """Whether every token goes to the experts that it must, by the maps that ranks returned."""
    names = [name for name in run.returned if kind_of(name) == KIND]
    if not names:
        return None
    names = [name for name in truth.tensors if name in names] or sorted(names)
    parted = {flaw.name: flaw for flaw in run.merged.flaws if flaw.kind == "replica conflict"}
    wrong = tuple(name for name in names if name in parted)
    if wrong:
        more = (state_fact("more_maps", count=len(wrong) - 1, maps=len(names)),) if len(wrong) > 1 else ()
        ranks = parted[wrong[0]].ranks
        facts = (_compare_choices(run, wrong[0], ranks), *more)
        return Finding(verdict=FAIL, facts=facts, names=wrong, ranks=ranks)
    whole = [name for name in names if name in run.tensors]
    loads = _find_busiest(run, whole)
    given = bool(set(names) & set(truth.from_ranks))
    if not given and any(kind_of(name) == KIND for name in truth.tensors):
        found = _compared(run, truth, claims)
        return found if found is None or found.verdict != PASS else replace(found, facts=(*found.facts, *loads))
    holders = [(n, b) for outcome in run.full_outcomes for n in names for b in outcome.get(n, ())]
    places = Counter((name, block.region) for name, block in holders if block.local.numel())
    copied = {name for (name, _), copies in places.items() if copies > 1}
    alone = tuple(name for name in names if name not in whole or name not in copied)
    if len(alone) == len(names):
        return Finding(verdict=UNKNOWN, facts=(state_fact("no_copies"),), notes=notes_about(undecided=alone))
    equal = state_fact("equal_maps", count=len(names) - len(alone))
    notes = (
        *notes_about(undecided=alone),
        *note_unchecked(f"choices themselves: the truth {'takes those of the ranks' if given else 'has no maps'}"),
    )
    return Finding(verdict=PASS, facts=(equal, *loads), notes=notes)


def _compare_choices(run: RecordedRun, name: str, ranks: Sequence[int]) -> Fact:
    """How the choices of the first of these ranks differ from those of the first rank that holds the same tokens."""
    rank = ranks[0]
    holders = [(other, block) for other, outcome in enumerate(run.full_outcomes) for block in outcome.get(name, ())]
    for mine in run.full_outcomes[rank][name]:
        first, theirs = next((other, block) for other, block in holders if block.region == mine.region)
        if not same_bits(mine.local, theirs.local):
            how = _count_moved_tokens(mine.local, theirs.local, rank, first)
            return state_fact("other_experts", name=name, ranks=ranks, first=first, how=how)
    raise AssertionError(f"{name}: no block of rank {rank} differs")  # the flaw says that one of them does


def _count_moved_tokens(mine: Tensor, theirs: Tensor, rank: int, first: int) -> Fact:
    """How many tokens go to other experts, and which experts the first such token goes to."""
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return state_fact("other_form", rank=rank, other=first)
    elsewhere = (mine != theirs).any(-1)
    if not bool(elsewhere.any()):
        return state_fact("other_bits", rank=rank, other=first)
    at = tuple(elsewhere.nonzero()[0].tolist())
    sent, must = (part[at].nonzero().flatten().tolist() for part in (mine, theirs))
    moved = int(elsewhere.sum())
    return state_fact(
        "moved_tokens", rank=rank, moved=moved, tokens=elsewhere.numel(), at=at, sent=sent, other=first, must=must
    )


def count_rows(whole: Tensor) -> Tensor:
    """The rows of every expert, int64 [experts], of a map [.., experts]."""
    return (whole != 0).reshape(-1, whole.shape[-1]).sum(0)


def balance_of_rows(rows_E: Tensor) -> float:
    """Rows of the busiest expert over the mean; 1 if no token goes anywhere."""
    mean = float(rows_E.double().mean())
    return float(rows_E.max()) / mean if mean else 1.0


LOAD_COLUMNS = ("case", "step", "module", "expert", "rows")


def load_rows(case: str, run: RecordedRun) -> Iterator[tuple[object, ...]]:
    """Rows of experts.csv: the rows of every expert, of all ranks and micro-batches of a step."""
    for name in sorted(name for name in run.tensors if kind_of(name) == KIND):
        _, step, module = [*name.split("/", 2), ""][:3]
        whole = run.tensors[name]
        for expert, count in enumerate(count_rows(whole).tolist() if whole.dim() else ()):
            yield case, step, module, expert, count


def _find_busiest(run: RecordedRun, names: Sequence[str]) -> tuple[Fact, ...]:
    """The busiest expert of all maps; () without a map."""
    counted = {name: count_rows(run.tensors[name]) for name in names if run.tensors[name].dim()}
    if not counted:
        return ()
    name = max(counted, key=lambda one: balance_of_rows(counted[one]))
    expert, times = int(torch.argmax(counted[name])), balance_of_rows(counted[name])
    return (state_fact("busiest", expert=expert, map=name.partition("/")[2], times=times),)
