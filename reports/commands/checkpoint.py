"""`shardproof checkpoint`: two checkpoints of any layouts, compared full tensor by full tensor.

With --export, A is written in the form of another system's folder. Exit status: 0 every tensor agrees, 1 one differs
(six lines on the first), 2 a folder holds no whole checkpoint. The comparison is `parallel.checkpoints.comparing`,
found by name as a subject is.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import asdict
from typing import Any

import pandas as pd

from harness.diagnosing.six_lines import NO_CAUSE, written
from harness.errors import RequestError
from harness.resolve import resolve
from reports.printing.tables import Table, count, table
from reports.printing.text import show_message, show_table

COMPARE, EXPORT = "parallel.checkpoints.comparing:compare", "parallel.checkpoints.comparing:export"


def main(parsed: argparse.Namespace) -> int:
    """Print what agrees, and the first tensor that does not. Exit status 1 when any differs.

    Raises RequestError for what is no whole checkpoint.
    """
    if len({parsed.b is None, parsed.export is not None, parsed.like is not None}) > 1:
        raise RequestError("checkpoint: needs B, or --export and --like without B; legal: shardproof checkpoint A B")
    compare: Any = resolve(COMPARE)
    try:
        if parsed.export:
            export: Any = resolve(EXPORT)
            print(f"{parsed.export}: {export(parsed.a, parsed.export, parsed.like)} parameters were written")
            return 0
        found = compare(parsed.a, parsed.b, parsed.tensor)
    except ValueError as problem:
        raise RequestError(str(problem)) from problem
    except OSError as problem:
        words = f"checkpoint {problem.filename}: cannot be read ({problem.strerror or problem})"
        raise RequestError(f"{words}; legal: a folder that can be read") from problem
    if parsed.json:
        print(json.dumps({"a": parsed.a, "b": parsed.b} | asdict(found), indent=2))
        return int(found.first is not None)
    for note in found.notes:
        show_message(f"note: {note}", sys.stdout)
    show_table(compared_table(found), sys.stdout)
    if found.first is None:
        show_message("pass: all tensors are the same bit for bit", sys.stdout, style="green")
        return 0
    show_message(six_lines(found, parsed.a, parsed.b), sys.stdout, style="bold red")
    if found.others:
        show_message(f"and {len(found.others)} more tensors differ: {_few(found.others)}", sys.stdout)
    return 1


def compared_table(found: Any) -> Table:
    """How many tensors of each kind were compared, and differ."""
    frame = pd.DataFrame([asdict(kind) for kind in found.kinds])
    columns = (
        ("", "kind", str),
        ("tensors", "tensors", count),
        ("elements", "elements", count),
        ("differ", "differ", count),
    )
    return table("Two checkpoints", frame, columns)


def six_lines(found: Any, a: str, b: str) -> str:
    """What differs first, where, by how much, the ranks that wrote it, why, and the command that repeats it."""
    first = found.first
    lines = {
        "what": first.what,
        "where": first.where,
        "error": first.error,
        "pieces": first.pieces,
        "causes": first.cause or NO_CAUSE,
        "repeat": f"shardproof checkpoint {shlex.join([a, b])} --tensor {shlex.quote(first.key)}",
    }
    return written(lines)


def _few(keys: tuple[str, ...]) -> str:
    shown = ", ".join(keys[:3])
    return f"{shown}, ..." if len(keys) > 3 else shown
