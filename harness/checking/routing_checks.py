"""The check of choices of experts (`routing/<step>/<module>`): maps [.., tokens, experts], exact, before any number.

    replicas    ranks that hold the same tokens choose the same experts for them, whether there is a truth or not
    truth       where the dense model returns maps, every token goes where it goes there

A router decides by token, so copies of a token must not part. Otherwise each rank would send it elsewhere, and all
numbers behind it would be of two models.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from shardproof.harness.checking.finding import Finding
from shardproof.harness.checking.measures.kinds import kind_of
from shardproof.harness.checking.numeric_checks import make_numeric_check
from shardproof.harness.checking.records import Claims, Run, Truth
from shardproof.harness.errors import ranks_text
from shardproof.harness.outcome.merging import same_bits
from shardproof.harness.verdicts.facts import note_unchecked, notes_about
from shardproof.harness.verdicts.verdict import FAIL, PASS, UNKNOWN

KIND = "routing"
_compared = make_numeric_check(KIND)


def check_routing(run: Run, truth: Truth, claims: Claims) -> Finding | None:
    """Whether every token goes to the experts that it must go to, by the maps that ranks returned."""
    names = [name for name in run.returned if kind_of(name) == KIND]
    names = [name for name in truth.tensors if name in names] or sorted(names)
    parted = {flaw.name: flaw for flaw in run.merged.flaws if flaw.kind == "replica conflict"}
    wrong = tuple(name for name in names if name in parted)
    if wrong:
        more = f"; {len(wrong) - 1} more of {len(names)} maps differ" if len(wrong) > 1 else ""
        ranks = parted[wrong[0]].ranks
        return Finding(verdict=FAIL, message=_describe_choices(run, wrong[0], ranks) + more, names=wrong, ranks=ranks)
    whole = [name for name in names if name in run.tensors]
    loads = _describe_load(run, whole)
    if any(kind_of(name) == KIND for name in truth.tensors):
        found = _compared(run, truth, claims)
        return found if found is None or found.verdict != PASS else replace(found, message=found.message + loads)
    holders = [(n, b) for outcome in run.full_outcomes for n in names for b in outcome.get(n, ())]
    places = Counter((name, block.region) for name, block in holders if block.local.numel())
    copied = {name for (name, _), copies in places.items() if copies > 1}
    alone = tuple(name for name in names if name not in whole or name not in copied)
    if len(alone) == len(names):
        message = "no rank holds a copy of another one's map, and the truth has none to compare them with"
        return Finding(verdict=UNKNOWN, message=message, notes=notes_about(undecided=alone))
    message = f"{len(names) - len(alone)} maps are equal on all ranks that hold the same tokens{loads}"
    notes = (*notes_about(undecided=alone), *note_unchecked("choices themselves: the truth has no maps"))
    return Finding(verdict=PASS, message=message, notes=notes)


def _describe_choices(run: Run, name: str, ranks: Sequence[int]) -> str:
    """Choices of the first of these ranks other than those of the first rank that holds the same tokens."""
    rank, others = ranks[0], f"rank {ranks_text(ranks)} {'parts' if len(ranks) == 1 else 'part'}"
    holders = [(other, block) for other, outcome in enumerate(run.full_outcomes) for block in outcome.get(name, ())]
    for mine in run.full_outcomes[rank][name]:
        first, theirs = next((other, block) for other, block in holders if block.region == mine.region)
        if not same_bits(mine.local, theirs.local):
            parted = _describe_moved_tokens(mine.local, theirs.local, rank, first)
            return f"{name}: {parted}; {others} from rank {first}, which holds the same tokens"
    raise AssertionError(f"{name}: no block of rank {rank} differs")  # the flaw says that one does


def _describe_moved_tokens(mine: Tensor, theirs: Tensor, rank: int, first: int) -> str:
    """How many tokens go elsewhere, and where the first of them does."""
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return f"rank {rank} returns a map of another form than rank {first}"
    elsewhere = (mine != theirs).any(-1)
    if not bool(elsewhere.any()):
        return f"rank {rank} returns other bits than rank {first} for the same choices"
    at = tuple(int(place) for place in elsewhere.nonzero()[0])
    sent, must = (" ".join(str(int(one)) for one in part[at].nonzero().flatten()) for part in (mine, theirs))
    token = f"the first, {at}, to {sent or 'none'}, on rank {first} to {must or 'none'}"
    return f"rank {rank} sends {int(elsewhere.sum())} of {elsewhere.numel()} tokens to other experts: {token}"


def count_rows(whole: Tensor) -> Tensor:
    """Rows of every expert, int64 [experts], of a map [.., experts]."""
    return (whole != 0).reshape(-1, whole.shape[-1]).sum(0)


def balance_of_rows(rows_E: Tensor) -> float:
    """Rows of the busiest expert over the mean; 1 where no token goes anywhere."""
    mean = float(rows_E.double().mean())
    return float(rows_E.max()) / mean if mean else 1.0


LOAD_COLUMNS = ("case", "step", "module", "expert", "rows")


def load_rows(case: str, run: Run) -> Iterator[tuple[object, ...]]:
    """Rows of experts.csv: what every expert gets, of all ranks and micro-batches of a step."""
    for name in sorted(name for name in run.tensors if kind_of(name) == KIND):
        _, step, module = [*name.split("/", 2), ""][:3]
        whole = run.tensors[name]
        for expert, count in enumerate(count_rows(whole).tolist() if whole.dim() else ()):
            yield case, step, module, expert, count


def _describe_load(run: Run, names: Sequence[str]) -> str:
    """The busiest expert of all maps, in words behind others."""
    counted = {name: count_rows(run.tensors[name]) for name in names if run.tensors[name].dim()}
    if not counted:
        return ""
    name = max(counted, key=lambda one: balance_of_rows(counted[one]))
    busiest = int(torch.argmax(counted[name]))
    return (
        f"; busiest: expert {busiest} of {name.partition('/')[2]}, {balance_of_rows(counted[name]):.3g} times the mean"
    )
