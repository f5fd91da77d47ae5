"""`shardproof hang DUMPS...`: which ranks parted from the others, at which call, in which module and line."""

from __future__ import annotations

import argparse
import sys

from harness.hangs.dumps import standings
from harness.hangs.parting import parted
from harness.hangs.words import lines
from reports.printing.text import show_message


def main(arguments: argparse.Namespace) -> int:
    """Print what was found; exit status 1 when ranks parted. Raises RequestError for what is no dump."""
    ranks = standings(arguments.dumps)
    found = parted(ranks)
    for line in lines(ranks, found):
        show_message(line, sys.stdout)
    return 1 if found else 0
