"""`shardproof new-subject`: a subject that runs, as a file to start from.

The files are those of `suites/subjects`, copied as they are.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from harness.errors import RequestError
from reports.printing.text import show_message

LIKE: Mapping[str, str] = {
    "mlp": "an MLP split over tp by hand",
    "dtensor": "DTensor's parallel styles",
    "fsdp2": "fully_shard",
    "pipelining": "stages of torch.distributed.pipelining",
    "hf": "a Hugging Face model under its own tp plan",
    "deepspeed": "DeepSpeed's ZeRO",
    "megatron": "Megatron-Core's GPTModel",
}
"""What can be written -> what it shows."""
_NEEDS = {
    "hf": ("transformers", "transformers"),
    "deepspeed": ("deepspeed", "deepspeed"),
    "megatron": ("megatron", "megatron-core"),
}
"""The package that a subject needs beside torch, as import and as pip know it."""
_FOLDER = Path(__file__).resolve().parents[2] / "suites" / "subjects"


def main(arguments: argparse.Namespace) -> int:
    """Write the file and print the command that runs it. Exit status 0; raises RequestError, and writes nothing, when
    there is a file already or the name is none of a module.
    """
    source = _FOLDER / f"{arguments.like}.py"
    target, text = Path(arguments.file), source.read_text(encoding="utf-8")
    if target.suffix != ".py" or not target.stem.isidentifier():
        raise RequestError(f"file={target}: must be the file of a module; legal: my_model.py")
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as problem:
        raise RequestError(f"file={target}: exists, and no file is overwritten; legal: a new name") from problem
    except OSError as problem:
        reason = problem.strerror or str(problem)
        raise RequestError(
            f"file={target}: cannot be written ({reason}); legal: a file in a folder of yours"
        ) from problem
    package, known = _NEEDS.get(arguments.like, ("torch", "torch"))
    if find_spec(package) is None:
        show_message(f"note: it needs {known}, which is not installed: pip install {known}", sys.stderr, style="yellow")
    folder = "" if target.parent == Path() else f"cd {shlex.quote(str(target.parent))} && "
    show_message(f"{target} is written: {LIKE[arguments.like]}. Run it, then make it yours:\n", sys.stdout)
    show_message(f"    {folder}shardproof run --subject {target.stem}:subject", sys.stdout)
    return 0
