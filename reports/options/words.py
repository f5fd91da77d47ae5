"""The words of `shardproof slice`, `checkpoint`, `record` and `hang` on the command line; nothing slow is imported."""

from __future__ import annotations

import argparse

SLICED = "parallel.slicing.words:Sliced"
"""The words of a slice, found by name as a subject is."""


def add_checkpoint(checkpoint: argparse.ArgumentParser) -> None:
    """Add what `shardproof checkpoint` takes."""
    checkpoint.description = (
        "Compare two checkpoints of any layouts, full tensor by full tensor: parameters, the optimizer's states, "
        "counters, random streams. Exit status 1 when they differ."
    )
    checkpoint.epilog = "example: shardproof checkpoint before after --tensor '*.exp_avg'"
    checkpoint.add_argument("a", metavar="A", help="folder of a checkpoint (docs/checkpoints.md)")
    checkpoint.add_argument("b", metavar="B", help="the same; or of Hugging Face or Megatron-Core, as A may be")
    checkpoint.add_argument("--tensor", default="*", metavar="KEY", help="only these keys, * and ? as in file names")
    checkpoint.add_argument("--json", action="store_true", help="the result as JSON on stdout, and nothing else there")


def add_slice(slices: argparse.ArgumentParser) -> None:
    """Add what `shardproof slice` takes."""
    slices.description = "Cut a model over ranks as DeepSpeed does where it is right, and print what each rank holds."
    slices.epilog = 'example: shardproof slice "family=opt hidden=768 heads=12 tp=2" --check model.safetensors'
    slices.add_argument("words", nargs="+", metavar="WORDS", help="one model, key=value words in quotes (help slice)")
    slices.add_argument(
        "--check",
        action="append",
        default=[],
        metavar="FILE",
        help="a checkpoint (once for each of its files): cut for all ranks, joined, compared bit for bit",
    )
    slices.add_argument("--json", action="store_true", help="the result as JSON on stdout, and nothing else there")


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


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of recording; what follows them is the program."""
    parser.add_argument("--steps", metavar="FIRST:END", help="record these steps; END is not included (all)")
    parser.add_argument("--profile", metavar="torch,nsys", help="profilers to run beside; torch needs --steps")
    parser.add_argument("--tokens", metavar="N", help="tokens of all ranks in a step, for tokens a second")
    parser.add_argument("--cluster", metavar="NAME|FILE", help="the machine's links, to hold bandwidth against them")
    parser.add_argument("--case", metavar="WORDS", help="the layout as a case, to hold calls, bytes and time against")
    parser.add_argument(
        "--silence",
        default="60",
        metavar="SECONDS",
        help="after how long without any event a rank writes down where it stands, for `shardproof hang` (60)",
    )
    parser.add_argument("--out", default="runs", metavar="DIR", help="where run folders go (runs)")
