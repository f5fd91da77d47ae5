"""Recorded values of a program: the tensors of every rank in the order of training, as files of a run folder.

    <folder>/values/rank-R.jsonl                a row a tensor (`ValueRow`), appended when a step ends
    <folder>/values/rank-R.step-S.safetensors   the tensors of one step, by `key`

A tensor that did not fit into the budget of bytes has a row with the reason in `left_out` and no tensor. Shapes and
offsets count elements, sizes are bytes.
"""

import functools
import importlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from shardproof.harness.errors import RequestError
from shardproof.harness.programs.session import NOT_INSTALLED

FOLDER = "values"
KINDS = (
    "param",  # the value of a parameter before the first step
    "buffer",  # the value of a floating buffer before the first step
    "sample",  # what the outermost module was called with; `name` is its place there: "args/0", "input_ids"
    "output",  # what a module returned in forward
    "loss",  # what backward began from, `name` ""
    "output_grad",  # the gradient of what a module returned
    "grad",  # the gradient of a parameter as backward left it
    "norm",  # the total norm that clipping returned, `name` ""
    "grad_clipped",  # the gradient of a parameter as the optimizer received it; only where it was clipped
    "param_after",  # the value of a parameter after the step
    "state_after",  # a state of the optimizer after the step; `leaf` is its name: "exp_avg"
)
"""In the order of training within a step. Unless said otherwise, `name` is as in `ValueRow`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueRow:
    """One recorded tensor of one rank.

    kind        one of KINDS
    step        number of optimizer steps before it
    name        path of the module or parameter, without the names that wrappers add
    wrapped     the path with these names, "" if it has none
    call        which call of this module in the step (micro-batches, modules that are used twice), from 0
    leaf        the place in a nested result, or the name of a state: "", "0", "logits", "exp_avg"
    number      position among all rows of the rank: the order in which the values came to be
    key         name of the tensor in the file, which rows of the same tensor share; "" where it is left out
    dtype       of the tensor as the program had it
    shape       of the local part that is stored
    global_shape, offsets   the place of the local part in the full tensor; None if nothing states it. A part that is no
                box has several rows. Those of FSDP1 are pieces of the flattened parameter
    pending     "sum", "avg", "norm 2": how ranks' parts are still to be reduced, "" for values that are whole
    pending_axes    names of the axes over which they are to be reduced
    replicated  whether the program states that other ranks hold the same values (DDP, DTensor, Megatron's attributes)
    stated_by   "dtensor", "fsdp", "ddp", "megatron", "memory" (a view of a parameter), "" where no layout is stated
    axes        the mesh of a DTensor or the groups of a Megatron layout, outermost first: (name, size, own coordinate)
    alias_of    name of the parameter whose storage this one shares (tied weights); "" for others
    left_out    why there is no tensor; "" where there is
    """

    kind: str
    step: int
    name: str
    wrapped: str = ""
    call: int = 0
    leaf: str = ""
    number: int = 0
    key: str = ""
    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...] | None = None
    offsets: tuple[int, ...] | None = None
    pending: str = ""
    pending_axes: tuple[str, ...] = ()
    replicated: bool = False
    stated_by: str = ""
    axes: tuple[tuple[str, int, int], ...] = ()
    alias_of: str = ""
    left_out: str = ""


_WORDS = tuple(one.name for one in fields(ValueRow))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankValues:
    """What one rank recorded: `rows` in the order of recording, and their tensors, which `tensor` reads.

    `about` are facts of the rank's program: "world_size"; "steps" that were recorded whole, and whether these are all
    that were asked for ("done"); "drawn": the modules that drew random numbers; "narrow": what stayed in another dtype
    under `--dtype float64`; "same_init": what did not get the other recording's initial value, and why; "drawn_parts":
    digests of the initial values that the program drew itself; "fed_by": the rank from which its first message came, -1
    if it sent one before; "wrappers": classes of modules that wrap others; "options": dtype and dropout as recorded;
    "failed": what the recorder failed at.
    """

    rank: int
    rows: tuple[ValueRow, ...]
    about: Mapping[str, Any] = field(default_factory=dict)
    folder: Path

    def tensor(self, row: ValueRow) -> Tensor:
        """The tensor of a row. Raises RequestError where it is left out, or its file cannot be read."""
        if not row.key:
            raise RequestError(f"value={row.name}: was left out ({row.left_out}); legal: a larger --budget")
        file = file_of_step(self.folder, self.rank, row.step)
        try:
            found: Tensor = _open_tensors(file, file.stat().st_mtime_ns).get_tensor(row.key)
        except Exception as problem:  # the library has errors of its own for each way a file can be wrong
            raise RequestError(f"values={file}: is no file of recorded values: {problem}") from None
        return found


@functools.lru_cache(maxsize=16)
def _open_tensors(file: Path, _changed_ns: int) -> Any:
    """The opened file of a step. It is kept open because opening reads the list of all its tensors."""
    return safetensors_module().safe_open(file, framework="pt")


def safetensors_module() -> Any:
    """The package safetensors. Raises RequestError where it is not installed."""
    try:
        importlib.import_module("safetensors.torch")
        return importlib.import_module("safetensors")
    except ImportError:
        raise RequestError(NOT_INSTALLED) from None


def file_of_step(folder: Path, rank: int, step: int) -> Path:
    """Where a rank keeps the tensors of a step."""
    return folder / FOLDER / f"rank-{rank}.step-{step}.safetensors"


def append_values(folder: Path, rank: int, step: int, rows: Iterable[ValueRow], tensors: Mapping[str, Tensor]) -> None:
    """Write what a rank recorded in one step; no two tensors share memory. Raises OSError."""
    (folder / FOLDER).mkdir(exist_ok=True)
    if tensors:
        together = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
        safetensors_module().torch.save_file(together, file_of_step(folder, rank, step))
    with (folder / FOLDER / f"rank-{rank}.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({name: getattr(row, name) for name in _WORDS}) + "\n" for row in rows)


def write_about(folder: Path, rank: int, about: Mapping[str, Any]) -> None:
    """Write the facts of a rank's program (`RankValues.about`). Raises OSError."""
    (folder / FOLDER).mkdir(exist_ok=True)
    (folder / FOLDER / f"rank-{rank}.json").write_text(json.dumps(about), encoding="utf-8")


def read_values(folder: Path) -> tuple[RankValues, ...]:
    """What all ranks recorded, by rank. Raises RequestError for a folder that holds no values, or wrong ones."""
    files = {int(file.stem.removeprefix("rank-")): file for file in (folder / FOLDER).glob("rank-[0-9]*.jsonl")}
    if not files:
        raise RequestError(f"folder={folder}: holds no values; legal: a folder of `shardproof record --values`")
    found = []
    for rank, file in sorted(files.items()):
        facts = file.with_suffix(".json")
        try:
            rows = tuple(_read_rows(file))
            about = json.loads(facts.read_text(encoding="utf-8")) if facts.is_file() else {}
        except (OSError, ValueError, TypeError, KeyError) as problem:
            raise RequestError(f"values={file}: is no list of recorded values: {problem}") from None
        found.append(RankValues(rank=rank, rows=rows, about=about, folder=folder))
    return tuple(found)


def _read_rows(file: Path) -> Iterator[ValueRow]:
    for line in file.read_text(encoding="utf-8").splitlines():
        words = json.loads(line)
        for name in ("shape", "global_shape", "offsets"):
            words[name] = None if words[name] is None else tuple(words[name])
        axes = tuple((str(name), int(size), int(at)) for name, size, at in words["axes"])
        yield ValueRow(**words | {"axes": axes, "pending_axes": tuple(words["pending_axes"])})
