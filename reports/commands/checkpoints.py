"""`shardproof checkpoint`: two checkpoints of any layouts, compared full tensor by full tensor; `shardproof slice`.

The exit status of checkpoint is 0 if every tensor agrees, 1 if one differs (six lines on the first), and 2 if a folder
holds no whole checkpoint. slice prints what every rank holds of each tensor of a model, or cuts and joins a checkpoint.
Ranges are first-last, both included. The code of both commands is in `parallel` and is found by name, as a subject is.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import pandas as pd

from shardproof.harness.errors import RequestError
from shardproof.harness.resolve import resolve
from shardproof.harness.verdicts.words import NO_CAUSE, label_lines
from shardproof.reports.options.command_options import SLICED
from shardproof.reports.printing.text import show_message, show_note, show_table
from shardproof.reports.printing.text_tables import Table, count, mark, table

COMPARE = "shardproof.parallel.checkpoints.comparing:compare"


def main(arguments: argparse.Namespace) -> int:
    """Print what agrees, and the first tensor that does not. Exit status 1 if any differs.

    Raises RequestError for an incomplete checkpoint.
    """
    compare: Any = resolve(COMPARE)
    try:
        difference = compare(arguments.a, arguments.b, arguments.tensor)
    except ValueError as problem:
        raise RequestError(str(problem)) from problem
    except OSError as problem:
        words = f"checkpoint {problem.filename}: cannot be read ({problem.strerror or problem})"
        raise RequestError(f"{words}; legal: a folder that can be read") from problem
    if arguments.json:
        print(json.dumps({"a": arguments.a, "b": arguments.b} | asdict(difference), indent=2))
        return int(difference.first is not None)
    for note in difference.notes:
        show_note(note, sys.stdout)
    kinds = pd.DataFrame([asdict(kind) for kind in difference.kinds])
    columns = (str, ": kind"), (count, "tensors | elements | differ")
    show_table(table("Two checkpoints", kinds, *columns), sys.stdout)
    if difference.first is None:
        show_message("pass: all tensors are the same bit for bit", sys.stdout, style="green")
        return 0
    show_message(six_lines(difference, arguments.a, arguments.b), sys.stdout, style="bold red")
    if others := difference.others:
        few = ", ".join(others[:3]) + ", ..." * (len(others) > 3)
        show_message(f"and {len(others)} more tensors differ: {few}", sys.stdout)
    return 1


def six_lines(difference: Any, a: str, b: str) -> str:
    """The first difference: what, where, by how much, which ranks wrote it, why, and the command that repeats it."""
    first = difference.first
    lines = {name: getattr(first, name) for name in ("what", "where", "error", "pieces")}
    repeat = f"shardproof checkpoint {shlex.join([a, b])} --tensor {shlex.quote(first.key)}"
    return "\n".join(label_lines(lines | {"causes": first.cause or NO_CAUSE, "repeat": repeat}))


SLICES = "shardproof.parallel.slicing.slices:slices"
CHECK = "shardproof.parallel.slicing.checkpoint:check"


def slice_main(arguments: argparse.Namespace) -> int:
    """Print the slices of one model. Exit status 1 if a checkpoint is not the same after cutting and joining it.

    Raises RequestError for words that describe no model.
    """
    words: Any = resolve(SLICED)
    slices: Any = resolve(SLICES)
    check: Any = resolve(CHECK)
    text = " ".join(arguments.words)
    try:
        sliced = words.parse(text)
        made = slices(sliced)
        checked = check(sliced, arguments.check) if arguments.check else None
    except ValueError as problem:
        raise RequestError(f"slice {text!r}: {problem}") from problem
    if arguments.json:
        print(json.dumps(_slices_as_json(text, sliced, made, checked), indent=2))
        return int(bool(checked and checked.wrong))
    show_table(held_table(text, sliced.path, rows_of_tensors(made, sliced.tp)), sys.stdout)
    return _print_checked(checked, arguments.check, sliced.tp)


def rows_of_tensors(made: Iterable[Any], tp: int) -> pd.DataFrame:
    """Rows for each rank of each tensor; the words of a tensor stand in its first row only.

    tensor, made_of, whole, dim, rank ("all" for what is whole), holds, part (shape on the rank), cut.
    """
    lines = []
    for one in made:
        place = one.place
        whole = _text_of_shape(place.shape)
        own = "" if one.sources == (one.name,) else " + ".join(one.sources)
        first = {"tensor": one.name, "made_of": own, "whole": whole, "cut": one.rule}
        if not place.cuts:
            lines.append({**first, "dim": "", "rank": "all", "holds": "whole", "part": whole})
            continue
        (cut,) = place.cuts
        dim = "elements" if len(place.shape) == 1 else ("rows", "columns")[cut.dim]
        for rank in range(tp):
            ranges = cut.held[rank]
            shape = (*place.shape[: cut.dim], sum(map(len, ranges)), *place.shape[cut.dim + 1 :])
            cells = {**dict.fromkeys(first, ""), "dim": ""} if rank else {**first, "dim": dim}
            lines.append({**cells, "rank": str(rank), "holds": _text_of_ranges(ranges), "part": _text_of_shape(shape)})
    return pd.DataFrame(lines, columns=["tensor", "made_of", "whole", "dim", "rank", "holds", "part", "cut"])


def _text_of_shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _text_of_ranges(ranges: Iterable[range]) -> str:
    """0-383 768-1151, or "none"."""
    return " ".join(f"{part.start}-{part.stop - 1}" if len(part) > 1 else str(part.start) for part in ranges) or "none"


def held_table(text: str, path: str, frame: pd.DataFrame) -> Table:
    """The table of `rows_of_tensors`."""
    columns = "tensor | whole | cut by: dim | rank | holds | shape there: part | how: cut"
    columns += " | made of: made_of" * bool(frame["made_of"].any())
    way = "kernel injection, weights [in, out]" if path == "container" else "AutoTP, weights [out, in]"
    return table(
        f"{text}: what each rank holds ({way})", frame, (str, columns), note="All layers are alike; one is listed."
    )


def _print_checked(checked: Any, files: Sequence[str], tp: int) -> int:
    """Print the result of a checkpoint. Returns the exit status."""
    if checked is None:
        return 0
    found = pd.DataFrame(checked.times.items(), columns=["tensor", "cut and joined"])
    show_table(table("The checkpoint", found, (mark, "tensor"), (count, "cut and joined")), sys.stdout)
    absent = [name for name, times in checked.times.items() if not times]
    for names, words in ((absent, "not in the checkpoint"), (checked.left_out, "of the checkpoint, in no slice")):
        if names:
            show_note(f"{words}: {', '.join(names)}", sys.stdout)
    if checked.wrong:
        show_message(f"fail: not the same once joined: {', '.join(checked.wrong)}", sys.stdout, style="bold red")
        return 1
    message = (
        f"pass: {checked.tensors} tensors of {' '.join(files)}, cut for {tp} ranks and joined, are the same bit for bit"
    )
    show_message(message, sys.stdout, style="green")
    return 0


def _slices_as_json(text: str, sliced: Any, made: Iterable[Any], checked: Any) -> dict[str, object]:
    """The slices as JSON. Held ranges are [start, stop), or null for a tensor that is whole on every rank."""
    tensors = [
        {
            "tensor": one.name,
            "made_of": list(one.sources),
            "shape": list(one.place.shape),
            "dim": one.place.cuts[0].dim if one.place.cuts else None,
            "held": [[[p.start, p.stop] for p in own] for own in one.place.cuts[0].held] if one.place.cuts else None,
            "copied": one.copied,
            "cut": one.rule,
        }
        for one in made
    ]
    check = {} if checked is None else {"check": asdict(checked)}
    return {"words": text, "path": sliced.path, "tp": sliced.tp, "tensors": tensors, **check}
