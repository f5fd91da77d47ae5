"""The words of `shardproof record` and `shardproof hang` on the command line; nothing is imported that takes long."""

from __future__ import annotations

import argparse

from harness.programs.options import add_options


def add_record(record: argparse.ArgumentParser) -> None:
    """Add what `shardproof record` takes."""
    record.usage = "shardproof record [options] -- COMMAND ..."
    record.description = "Run a command and record the collectives of every rank that it starts into one run folder."
    record.epilog = "example: shardproof record --steps 10:20 -- torchrun --nproc-per-node 4 train.py --lr 0.1"
    add_options(record)
    record.add_argument("program", nargs=argparse.REMAINDER, metavar="COMMAND ...", help="the command, after --")


def add_hang(hang: argparse.ArgumentParser) -> None:
    """Add what `shardproof hang` takes."""
    hang.description = "Compare what every rank did last. Exit status 1 when ranks parted, 0 when none did."
    hang.epilog = "example: shardproof hang runs/latest   or   shardproof hang /tmp/nccl_trace_rank_*"
    hang.add_argument("dumps", nargs="+", metavar="DUMP", help="a run folder of `record`, or Flight Recorder files")
