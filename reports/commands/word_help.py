"""`shardproof help case | slice | calls CASE`: the words of the case language and of a slice, the calls of a case.

Words are printed from what their classes declare. `shardproof new-subject` writes a subject that runs, to start from:
the files are those of `suites/subjects`, copied as they are.
"""

import argparse
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

from shardproof.harness.dense_model import dense_model
from shardproof.harness.errors import RequestError
from shardproof.harness.resolve import resolve
from shardproof.reports.options.command_options import SLICED


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """Topic of help: the class whose `meanings()` are printed, what it is in words, and a command as example."""

    title: str
    words: Callable[[], Any]
    lead: str
    example: str


_WORDS = (
    "words `key=value` in any order, in quotes. A word that is left out has its default; "
    "a default marked with * is derived from other words when one of them is given. `preset` sets many words at once."
)
TOPICS: dict[str, Topic] = {
    "case": Topic(
        title="The words of a case",
        words=lambda: dense_model().case,
        lead=f"A case is one experiment: {_WORDS}",
        example='shardproof run "mode=tp-sp tp=4 kv_heads=4 steps=3 dtype=bfloat16"',
    ),
    "slice": Topic(
        title="The words of a slice",
        words=lambda: resolve(SLICED),
        lead=f"A slice is a model cut over ranks: {_WORDS}",
        example='shardproof slice "family=opt hidden=768 heads=12 tp=2"',
    ),
}


def main(arguments: argparse.Namespace) -> int:
    """Print the words, or with `--markdown` the page docs/case.md; or the calls of a case. Returns 0.

    Raises RequestError for a case that is none, or of which the subject states no calls.
    """
    text_of_case = " ".join(arguments.case)
    if arguments.topic == "calls":
        _show_calls(text_of_case, arguments.subject)
        return 0
    if text_of_case:
        raise RequestError(f"case {text_of_case!r}: help {arguments.topic} takes no case; legal: help calls CASE")
    topic = TOPICS[arguments.topic]
    sys.stdout.write(
        help_as_markdown(topic) if arguments.markdown else help_as_text(topic, shutil.get_terminal_size().columns)
    )
    return 0


def _show_calls(text_of_case: str, name: str) -> None:
    from shardproof.harness.subject import case_of, refusal, resolve_subject  # noqa: PLC0415  (loads torch, which the words do not need)
    from shardproof.harness.subject.call import answer_question  # noqa: PLC0415
    from shardproof.reports.printing.calls import calls_table  # noqa: PLC0415
    from shardproof.reports.printing.text import show_table  # noqa: PLC0415

    subject = resolve_subject(name)
    case = case_of(text_of_case, subject)
    expected = getattr(subject.call, "expected", None)
    if reason := refusal(case, subject):
        raise RequestError(f"case {str(case)!r}: {reason}")
    terms = None if expected is None else answer_question("expected", lambda: expected(case))
    if terms is None:
        raise RequestError(f"subject={name}: states no calls for {case}; legal: a subject with `expected(case)`")
    show_table(calls_table(str(case), terms), sys.stdout)


def help_as_text(topic: Topic, columns: int) -> str:
    """The words by group for a terminal of this many columns (at least 60)."""
    lines = [*textwrap.wrap(topic.lead.replace("`", ""), max(columns, 60)), "", f"example: {topic.example}"]
    for group, words in _groups_of_words(topic):
        lines += ["", f"{group}:"]
        for word in words:
            left = f"  {word.name}={word.default}{'*' if word.follows else ''}"
            meaning = f"{word.meaning}; legal: {_legal_values(word)}"
            lines += textwrap.wrap(
                meaning,
                max(columns, 60),
                initial_indent=f"{left:28}",
                subsequent_indent=" " * 28,
                break_on_hyphens=False,
            )
    return "\n".join(lines) + "\n"


def help_as_markdown(topic: Topic) -> str:
    """Help as markdown: one table a group."""
    lines = [f"# {topic.title}", "", *textwrap.wrap(topic.lead, 120), "", f"    {topic.example}", ""]
    lines += [f"`shardproof help {_name_of_topic(topic)}` prints this page; a test holds the two equal.", ""]
    for group, words in _groups_of_words(topic):
        lines += [f"## {group[:1].upper()}{group[1:]}", "", "| word | default | meaning | legal |", "|---|---|---|---|"]
        below: list[str] = []
        for word in words:
            lines.append(_row_of_word(word, _legal_values(word)))
            if len(lines[-1]) > _WIDEST:
                lines[-1] = _row_of_word(word, "below")
                below += ["", *textwrap.wrap(f"{word.name}: {_legal_values(word)}", 116, break_on_hyphens=False)]
        lines += [*(f"    {line}" if line else "" for line in below), ""]
    return "\n".join(lines).rstrip() + "\n"


_WIDEST = 200
"""Columns of a row; legal values that would make it wider stand below their table."""


def _row_of_word(word: Any, legal: str) -> str:
    default = f"`{word.default}`" if word.default else ""
    cells = (f"`{word.name}`", f"{default}{'*' if word.follows else ''}", word.meaning, legal)
    return "| " + " | ".join(cell.replace("|", ", ") for cell in cells) + " |"


def _name_of_topic(topic: Topic) -> str:
    return next(name for name, known in TOPICS.items() if known == topic)


def _groups_of_words(topic: Topic) -> Iterator[tuple[str, Iterable[Any]]]:
    return groupby(topic.words().meanings(), key=lambda word: word.group)


def _legal_values(word: Any) -> str:
    derived = f" (* from {', '.join(word.follows)})" if word.follows else ""
    return f"{word.legal.replace('|', ', ')}{derived}"


LIKE: Mapping[str, str] = {
    "mlp": "an MLP split over tp by hand",
    "dtensor": "DTensor's parallel styles",
    "fsdp2": "fully_shard",
    "pipelining": "stages of torch.distributed.pipelining",
    "muon": "Muon by hand: updates of split matrices, shared out in three ways",
    "muon-fsdp2": "torch.optim.Muon under a tensor-parallel plan and FSDP2",
    "lora": "LoRA by hand under tp and sequence parallelism",
    "lora-peft": "peft's LoRA on a Hugging Face model under FSDP2 or DDP",
    "mixer": "a gated delta rule on packed rows over tp and context ranks",
    "policy": "losses of reinforcement learning over tp, context and data ranks",
    "hf": "a Hugging Face model under its own tp plan",
    "deepspeed": "DeepSpeed's ZeRO",
    "megatron": "Megatron-Core's GPTModel",
    "megatron-training": "Megatron-Core's pipeline, optimizers and experts",
    "torchtitan": "torchtitan's models under its parallelize functions",
}
"""Subjects that can be written -> what each shows."""
_NEEDS = {
    "lora-peft": ("peft", "peft"),
    "hf": ("transformers", "transformers"),
    "deepspeed": ("deepspeed", "deepspeed"),
    "megatron": ("megatron", "megatron-core"),
    "megatron-training": ("megatron", "megatron-core"),
    "torchtitan": ("torchtitan", "torchtitan"),
}
"""The package that a subject needs beside torch, as import and as pip know it."""
_FOLDER = Path(__file__).resolve().parents[2] / "suites" / "subjects"


def new_subject_main(arguments: argparse.Namespace) -> int:
    """Write the file and print the command that runs it. Exit status 0; raises RequestError, and writes nothing, when
    there is a file already or the name is none of a module.
    """
    from shardproof.reports.printing.text import show_message, show_note  # noqa: PLC0415  (loads rich, which the words do not need)

    source = _FOLDER / f"{arguments.like.replace('-', '_')}.py"
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
        show_note(f"it needs {known}, which is not installed: pip install {known}", sys.stderr)
    folder = "" if target.parent == Path() else f"cd {shlex.quote(str(target.parent))} && "
    show_message(f"{target} is written: {LIKE[arguments.like]}. Run it, then make it yours:\n", sys.stdout)
    show_message(f"    {folder}shardproof run --subject {target.stem}:subject", sys.stdout)
    return 0
