"""The case: one experiment in words; `reference.language` has their meanings and rules. No torch is loaded.

case          `Case`: the frozen, validated value and its one-line text form; named models and the families' defaults
variants      known deviations of real systems, and which cases can show each
domains       the values that stand for all that a word can have; words are changed until a case is legal
default_cases the cases that run when none is given; default_cases.txt has their lines
"""

from shardproof.reference.case.case import Case
from shardproof.reference.errors import CaseError

__all__ = ["Case", "CaseError"]
