"""Reads the table of `parallel.schemes.isp`: the calls that it promises for a case, whatever module issues them.

Written without a look at the closed form, from the case's sizes alone.
"""

from __future__ import annotations

import math
from collections import Counter

from parallel.schemes import isp
from reference.case import Case
from reference.model.parameters import shapes

Line = tuple[str, str, str, int]
"""(phase, op, axis, payload bytes)."""

_ITEM = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def promised(case: Case) -> Counter[Line]:
    """Every call of a whole run that the table promises one rank, data apart."""
    found: Counter[Line] = Counter()
    for tensor, axis, forward, recompute, backward, letters in _rows():
        name, *words = [word for part in tensor.split(" ") for word in [part] if word]
        conditions = [word.split("=") for word in words if "=" in word]
        if len(case.axes[axis][0]) == 1 or any(str(getattr(case, key)).lower() != value for key, value in conditions):
            continue
        for size in _payloads(name, tensor, letters, case):
            if name == "step:":
                found.update({("grad_sync", op, axis, size): case.steps for op in _ops(backward)})
                continue
            phases = {"loss" if name == "loss" else "forward": forward, "backward": backward}
            if case.recompute == "full":
                phases["recompute"] = recompute
            for phase, cell in phases.items():
                for op in _ops(cell):
                    found[(phase, op, axis, size)] += case.steps * case.micro
    return found


def _rows() -> list[list[str]]:
    assert isp.__doc__
    cells = [[cell.strip() for cell in line.split("|")] for line in isp.__doc__.splitlines() if line.count("|") == 5]
    assert cells[0] == ["tensor", "axis", "forward", "recompute", "backward", "bytes"]
    return cells[1:]


def _ops(cell: str) -> list[str]:
    ops: list[str] = []
    for part in cell.split(",") if cell != "-" else []:
        count, _, op = part.strip().rpartition(" ")
        ops += [op] * int(count or 1)
    return ops


def _payloads(name: str, tensor: str, letters: str, case: Case) -> list[int]:
    """Payloads in bytes of all calls that the row stands for in one micro-batch (or step)."""
    item, one = _ITEM[case.dtype], 8 if case.dtype == "float64" else 4
    sizes = {parameter: math.prod(shape) * item for parameter, shape in shapes(case).items()}
    inner = [parameter for parameter in sizes if parameter.rpartition(".")[0].rpartition(".")[2][0] == "w"]
    match letters:
        case "K" if name in ("embedding", "head"):
            padded = name == "head" or case.embedding == "vocab"
            return [(case.padded_vocab if padded else case.vocab) * case.hidden * item]
        case "K" | "k":
            leaf = {"K": ".weight", "k": ".bias"}[letters]
            return [sizes[parameter] for parameter in inner if parameter.endswith(leaf)]
        case "K+k":
            blocks: Counter[str] = Counter()
            for parameter in inner:
                blocks[parameter.split(".")[1]] += sizes[parameter]
            return list(blocks.values())
        case "A/p":
            return [case.tokens * case.hidden * item // case.tp] * case.layers
        case "KV/p":
            numbers = case.tokens * 2 * max(case.kv_heads, case.tp) * case.head_dim
            return [numbers * item // case.tp] * case.layers
        case "N":
            whole = [parameter for parameter in sizes if "norm" in parameter or "positions" in parameter]
            return [sizes[parameter] for parameter in whole]
        case "G":
            tables = case.padded_vocab * (1 if case.tied else 2)
            if case.embedding == "hidden":
                tables += case.vocab - case.padded_vocab
            split = tables * case.hidden * item + sum(sizes[parameter] for parameter in inner)
            whole_bytes = sum(sizes[p] for p in sizes if "norm" in p or "positions" in p)
            return [split // case.wp + whole_bytes]
    logits = {"V/p": case.padded_vocab * case.tokens * item // case.tp, "v": case.vocab * case.tokens * item}
    numbers_of = {**logits, "T": case.tokens * one, "2*T": 2 * case.tokens * one, "W": one, "16": 16}
    return [numbers_of[letters]]
