"""The case: one experiment in words; `reference.language` has their meanings and rules. No torch is loaded.

case          `Case`: the frozen, validated value and its one-line text form
conditions    which cases can show a planted bug, as text
presets       named models, the families' defaults, sizes that follow other sizes
variants      known deviations of real systems, and which cases can show each
domains       the values that stand for all that a word can have
default_cases the cases that run when none is given; default_cases.txt has their lines
repair        changes words until a case is legal
"""

from shardproof.reference.case.case import Case
from shardproof.reference.errors import CaseError

__all__ = ["Case", "CaseError"]
