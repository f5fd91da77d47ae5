"""The command line: `shardproof run | record | hang | show | compare | page | trace | predict | slice | checkpoint |
faults | expect | names | new-subject | bench | doctor` and `help`.

Exit status: 0 all pass; 1 a check failed; 2 the request was wrong (one message, no traceback); 3 the machine failed.
Further ones: 130 interrupted, 141 the reader of the output has closed it.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import NoReturn

from harness.dense_model import SUBJECT
from harness.errors import ShardproofError
from harness.interpreter import uncollected
from harness.running.engines import ENGINES
from reports.options.words import add_checkpoint, add_hang, add_record, add_slice

LIKE = ("mlp", "dtensor", "fsdp2", "pipelining", "hf", "deepspeed", "megatron", "megatron-training", "torchtitan")
CLUSTER = "8xH100-NVLink-IB400"
_NEW_SUBJECT = "Write a runnable subject: model, truth, words. At most 60 lines; megatron-training, torchtitan: 120."
_TRUTH = "a dense model to compare with; alone: the subject itself on one rank (its attribute truth, or our decoder)"
_TIMEOUT = "how long a run of a case may take, and its dense model (60); every case is run up to three times"
_WRONG_REQUEST, _MACHINE, _INTERRUPTED, _NO_READER = 2, 3, 130, 141


class _Parser(argparse.ArgumentParser):
    """A wrong option is one line, like every wrong request."""

    def error(self, message: str) -> NoReturn:
        _complain(f"{self.prog}: {message}; see {self.prog} --help")
        self.exit(_WRONG_REQUEST)


class _Version(argparse.Action):
    """Prints the installed version; looked up only then."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:  # noqa: A002  (argparse's name)
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"shardproof {metadata.version('shardproof')}")
        parser.exit(0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command of these words (default: the process's own) and return its exit status."""
    try:
        parsed = _parser().parse_args(arguments)
    except SystemExit as end:  # argparse has printed its help or its one message
        return end.code if isinstance(end.code, int) else _WRONG_REQUEST
    if empty := _empty(parsed):
        _complain(f"shardproof {parsed.command}: {empty}='': is empty; legal: a word, or leave it out")
        return _WRONG_REQUEST
    parsed.isolated = arguments is None  # the process is ours: nobody has used autograd in it
    try:
        with uncollected():
            from reports.options.request import read

            parsed.request = read(parsed)
            command = _command(parsed.command)
        status = command(parsed)
        sys.stdout.flush()
    except ShardproofError as error:
        _complain(f"shardproof {parsed.command}: {error}")
        return error.exit_status
    except KeyboardInterrupt:
        print("\nshardproof: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # What is still buffered has no reader; without this Python complains once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _NO_READER
    except Exception:  # a bug of ours, told as such: 1 would say that a check failed
        traceback.print_exc()
        _complain("shardproof: this is a bug in shardproof and no verdict on the subject")
        return _MACHINE
    return int(status)


def _command(word: str) -> Callable[[argparse.Namespace], int]:  # noqa: PLR0912  (a command each)
    """Function of this command, imported now: neither `--help` nor a wrong word waits for torch and pandas."""
    match word:
        case "run":
            from reports.commands.run import main
        case "record":
            from reports.programs.command import main
        case "hang":
            from reports.programs.command import hang_main as main
        case "show":
            from reports.commands.show import main
        case "compare":
            from reports.commands.compare import main
        case "page":
            from reports.commands.show import page_main as main
        case "trace":
            from reports.commands.trace import main
        case "faults":
            from reports.commands.faults import main
        case "bench":
            from reports.commands.run import bench_main as main
        case "doctor":
            from reports.commands.doctor import main
        case "predict":
            from reports.commands.predict import main
        case "slice":
            from reports.commands.checkpoints import slice_main as main
        case "checkpoint":
            from reports.commands.checkpoints import main
        case "expect":
            from reports.commands.expect import main
        case "names":
            from reports.commands.names import main
        case "new-subject":
            from reports.commands.word_help import new_subject_main as main
        case _:
            from reports.commands.word_help import main
    return main


def _complain(message: str) -> None:
    """Print what is wrong on stderr; rich, which folds it in a terminal, is loaded only there."""
    if sys.stderr.isatty():
        from reports.printing.text import show_words

        show_words(message, sys.stderr)
    else:
        print(message, file=sys.stderr)


def _empty(parsed: argparse.Namespace) -> str:
    """Option that was given as an empty word, as a shell does with an unset variable: it must choose nothing."""
    for name, value in vars(parsed).items():
        if name == "program":  # the words of another command
            continue
        words = value if isinstance(value, list) else [value]
        if any(isinstance(word, str) and not word.strip() for word in words):
            return {"cases": "case", "output": "-o"}.get(name, name.replace("_", "-"))
    return ""


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="shardproof",
        description="Proves that parallel training computes what the dense model does, and accounts for every byte.",
        epilog="exit status: 0 all pass, 1 a check failed, 2 a wrong request, 3 the machine failed, 130 interrupted",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, help="print the version of shardproof")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    add = functools.partial(commands.add_parser, allow_abbrev=False)
    _add_run(add("run", help="run cases, check them against the reference, record, report"))
    add_record(add("record", help="record a training program as it is: torchrun, accelerate launch, python ..."))
    add_hang(add("hang", help="after a hang: which ranks parted from the others, at which call, module and line"))
    show = add("show", help="the tables of a run again")
    _add_compare(add("compare", help="regression report of two runs; one run alone: its modes against each other"))
    page = add("page", help="one self-contained HTML file of a run")
    trace = add("trace", help="a run as Chrome/Perfetto JSON, one process a rank")
    for command in (show, page, trace):
        command.add_argument("run", nargs="?", default="runs/latest", metavar="RUN", help="run folder (runs/latest)")
    page.add_argument("-o", dest="output", metavar="FILE", help="where to write it (report.html in the run folder)")
    page.add_argument("--markdown", action="store_true", help="a comment for a pull request, printed without -o")
    trace.add_argument("-o", dest="output", metavar="FILE", help="where to write it (trace.json there); .gz is packed")
    _add_faults(add("faults", help="plant bugs one at a time: which check notices which"))
    _add_predict(add("predict", help="time, memory and bytes at any size, without running it; which mode, and where"))
    add_slice(add("slice", help="what every rank holds of each tensor that DeepSpeed slices; cut a checkpoint"))
    add_checkpoint(add("checkpoint", help="compare two checkpoints of any layouts, tensor by tensor"))
    expect = add("expect", help="what a case of a run did, as terms to paste into a subject")
    expect.description = "Print the calls that a run recorded as Python: a function expected(case) of shardproof.Terms."
    expect.epilog = "example: shardproof expect runs/latest --short"
    expect.add_argument("run", metavar="RUN", help="run folder, such as runs/latest")
    expect.add_argument("case", nargs="*", metavar="CASE", help="the case, where the run has several")
    expect.add_argument("--short", action="store_true", help="one term for all calls of an op over an axis")
    names = add("names", help="the names, shapes and dtypes that a subject may return in a case")
    names.description = "Compute the truth of a case and print its names, by kind and in the order of computation."
    names.epilog = 'example: shardproof names "mode=tp tp=2 layers=1"'
    names.add_argument("case", nargs="+", metavar="CASE", help="one case, key=value words (help case)")
    names.add_argument("--subject", default=SUBJECT, metavar="M:O", help=f"whose truth and words ({SUBJECT})")
    names.add_argument("--truth", metavar="M:O|alone", help=_TRUTH)
    new = add("new-subject", help="write a subject that runs, to start from")
    new.description = _NEW_SUBJECT
    new.epilog = "example: shardproof new-subject my_model.py --like dtensor"
    new.add_argument("file", metavar="FILE", help="the new file, such as my_model.py")
    new.add_argument("--like", choices=LIKE, default="mlp", help="what it is made of (mlp: by hand)")
    bench = add("bench", help="the performance table, measured here")
    bench.add_argument("--faults", action="store_true", help="instead: what each engine makes of a rank gone wrong")
    bench.add_argument("--out", metavar="DIR", help="folder of bench.csv or faults.csv (runs/bench)")
    bench.add_argument("--quick", action="store_true", help="without the proof at real widths, which takes a minute")
    add("doctor", help="what this machine offers, what would be skipped, and why")
    about = add(
        "help", help="`help case`: every word of a CASE; `help slice`; `help calls CASE`: its collectives and why"
    )
    about.add_argument(
        "topic", choices=("case", "slice", "calls"), metavar="case|slice|calls", help="words, or the calls of a CASE"
    )
    about.add_argument("case", nargs="*", metavar="CASE", help="of `help calls`: key=value words")
    about.add_argument("--subject", default=SUBJECT, metavar="M:O", help=f"whose calls ({SUBJECT})")
    about.add_argument("--markdown", action="store_true", help="as a page of markdown, such as docs/case.md")
    return parser


def _add_run(run: argparse.ArgumentParser) -> None:
    run.description = "Run cases on a subject. Without a CASE: every mode the subject claims, on 2 and 4 ranks."
    run.epilog = 'example: shardproof run "mode=tp-sp tp=4 kv_heads=4 dtype=float64" --data corpus.txt'
    run.add_argument("cases", nargs="*", metavar="CASE", help="one case each, key=value words in quotes (help case)")
    run.add_argument("--subject", default=SUBJECT, metavar="M:O", help=f"implementation under test ({SUBJECT})")
    run.add_argument("--truth", metavar="M:O|alone", help=_TRUTH)
    run.add_argument("--modes", default="all", metavar="all|a,b", help="modes to run when no CASE is given (all)")
    run.add_argument(
        "--deep", action="store_true", help="without a CASE: every two values of two words together, on up to 8 ranks"
    )
    run.add_argument("--engine", choices=tuple(ENGINES), default="inproc", help="how ranks are run (inproc)")
    run.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where tensors live (cpu)")
    run.add_argument("--data", metavar="PATH", help="text, JSONL or tokenized data for every case")
    run.add_argument("--variant", metavar="NAME", help="a known deviation of real systems, in every case: it must fail")
    run.add_argument("--profile", metavar="torch,nsys", help="witnesses: run each case under these tools too")
    run.add_argument("--profile-steps", metavar="FIRST:END", help="steps they watch; END is not included (all)")
    run.add_argument("--preset-experiment", metavar="NAME", help="repeat a published run: gpt3-857m-tp4")
    run.add_argument("--emit-repro", metavar="FILE", help="the first failure, shrunk, as a script of its own")
    run.add_argument("--timeout", default="60", metavar="SECONDS", help=_TIMEOUT)
    run.add_argument("--when", default="10", metavar="SECONDS", help="longest search for a failure's `when:`; 0: none")
    run.add_argument("--fail-fast", action="store_true", help="stop after the first case that does not pass")
    run.add_argument("--out", default="runs", metavar="DIR", help="where run folders go (runs)")
    run.add_argument(
        "--json", action="store_true", help="the result as one JSON object on stdout, and nothing else there"
    )


def _add_compare(compare: argparse.ArgumentParser) -> None:
    compare.description = "What is new, gone, changed or slower in NEW. Exit status 1 when a limit is broken."
    compare.epilog = "example: shardproof compare main runs/latest --fail bytes:0 --fail calls:0 --fail time:10%"
    compare.add_argument("base", metavar="BASE", help="run folder, or name of a baseline")
    compare.add_argument("new", nargs="?", metavar="NEW", help="the same; left out: modes of BASE against each other")
    compare.add_argument(
        "--fail",
        action="append",
        default=[],
        metavar="WHAT:LIMIT",
        help="events:0 (when none is given), calls, bytes, memory: a number or percentage; time, wall: a percentage",
    )
    compare.add_argument("--save-baseline", metavar="NAME", help="store NEW (or BASE alone) under this name")
    compare.add_argument("--baselines", default="baselines", metavar="DIR", help="where baselines are (baselines)")
    compare.add_argument("--json", action="store_true", help="everything as one JSON object")


def _add_faults(faults: argparse.ArgumentParser) -> None:
    faults.description = (
        "Plant bugs one at a time and prove each: the kill matrix. Our own implementation gets every mutant, variant "
        "and fault in every mode; another subject the faults of its collectives, which need no source. With a CASE: "
        "the faults of that case's collectives."
    )
    faults.add_argument("cases", nargs="*", metavar="CASE", help="key=value words in quotes (help case)")
    faults.add_argument("--subject", default=SUBJECT, metavar="M:O", help=f"implementation under test ({SUBJECT})")
    faults.add_argument("--truth", metavar="M:O|alone", help=_TRUTH)
    faults.add_argument("--quick", action="store_true", help="one mode a mutant and few faults: minutes on two cores")
    part = faults.add_mutually_exclusive_group()
    part.add_argument("--held-back", action="store_true", help="only the mutants that no rule of diagnosis has seen")
    part.add_argument("--open", action="store_true", help="everything but those")
    faults.add_argument(
        "--field",
        action="store_true",
        help="only bugs of public issues (docs/catalogue.md), each beside the same case without it",
    )
    faults.add_argument(
        "--dtype",
        choices=("float64", "float32", "bfloat16"),
        help="prove in cases of this dtype (as drawn); bugs that show in others alone keep theirs",
    )
    faults.add_argument(
        "--emit-repro",
        nargs=2,
        metavar=("NAME|all", "DIR"),
        help="plant nothing; write open bugs as scripts of their own",
    )
    faults.add_argument("--timeout", default="60", metavar="SECONDS", help=_TIMEOUT)
    faults.add_argument("--out", default="runs", metavar="DIR", help="where run folders go (runs)")
    faults.add_argument("--json", action="store_true", help="the figures as one JSON object on stdout")


def _add_predict(predict: argparse.ArgumentParser) -> None:
    predict.description = (
        "Predict cases by closed form, dry run and cost model. Without mode=, all modes are compared; without dtype=, "
        "parameters are bfloat16; without optimizer=, AdamW trains in mixed precision (18 bytes a parameter)."
    )
    predict.epilog = 'example: shardproof predict "preset=llama3-405b mode=tp-sp tp=8 dp=2048"'
    predict.add_argument("cases", nargs="+", metavar="CASE", help="one case each, key=value words in quotes")
    predict.add_argument(
        "--cluster", default=CLUSTER, metavar="NAME|FILE", help=f"a named cluster or a TOML file ({CLUSTER})"
    )
    predict.add_argument("--world", type=int, metavar="N", help="search the meshes of N ranks for every CASE")
    predict.add_argument("--suggest", action="store_true", help="the best layouts, of all that the case leaves open")
    predict.add_argument("--subject", default=SUBJECT, metavar="M:O", help=f"implementation to predict ({SUBJECT})")
    predict.add_argument("-o", "--out", metavar="DIR", help="write tables, plots and ledger into a folder below DIR")
    predict.add_argument("--json", action="store_true", help="the result as JSON on stdout, and nothing else there")
