"""Faults that cannot be noticed, because the program they make computes the same: rules, each with its proof in words.

A rule reads the fault alone; `subject.harmless(case, fault)` states what a subject knows of its mathematics. Two more
proofs need a run and are made by `harness.injecting.survey`. UNCHANGED: every disturbed call left the very bits that it
leaves undisturbed. UNREAD: all other calls did, and all that the subject returns has the same bits. They hold for the
case that was run. Checks that did not fail prove nothing and are nowhere taken for a proof.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardproof.harness.faults import Fault

UNCHANGED = "every call left the bits that it leaves undisturbed, on every rank: it is the same run"
UNREAD = "every other call and all that the subject returns have the same bits: nothing depends on what was disturbed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Answer of the checks to a planted fault: those that failed, in their order; why it is no fault; its seconds.

    `killed_by` is "run" where the program raises or does not end. `machine` is why the machine could not finish it.
    """

    killed_by: tuple[str, ...] = ()
    equivalent: str = ""
    machine: str = ""
    seconds: float = 0.0

    @property
    def killed(self) -> bool:
        """Whether a check noticed."""
        return bool(self.killed_by)

    @property
    def survived(self) -> bool:
        """Whether no check noticed a fault that is one."""
        return not (self.killed_by or self.equivalent or self.machine)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """`proof` of the faults for which it holds: one line of words."""

    proof: str
    holds: Callable[[Fault], bool]


def _double(*ops: str, reduce_ops: Sequence[str] = ()) -> Callable[[Fault], bool]:
    """Whether a fault doubles a call of these ops, and of these reduce ops where there are any."""

    def holds(fault: Fault) -> bool:
        target = fault.target
        return fault.kind == "double" and target.op in ops and (not reduce_ops or target.reduce_op in reduce_ops)

    return holds


def _in_group_of_one(fault: Fault) -> bool:
    return fault.target.group_size == 1 and (fault.kind in {"drop", "op", "delay"} or _double("all_reduce")(fault))


RULES = (
    Rule(proof="in a group of one the rank's own data are the result, under any reduction", holds=_in_group_of_one),
    Rule(
        proof="max and min are idempotent: the result, reduced once more, is the result",
        holds=_double("all_reduce", "reduce", "reduce_scatter", reduce_ops=("max", "min")),
    ),
    Rule(
        proof="after an average all ranks hold the same numbers, whose average they are",
        holds=_double("all_reduce", reduce_ops=("avg",)),
    ),
    Rule(
        proof="what is moved once more, from inputs that the call does not change, is the same",
        holds=_double("broadcast", "all_gather", "gather", "scatter"),
    ),
)


def proof_of(fault: Fault, rules: Sequence[Rule] = RULES) -> str:
    """Why no check can notice this fault; "" when no rule shows it."""
    return next((rule.proof for rule in rules if rule.holds(fault)), "")
