"""The words of every command but `run` on the command line; nothing slow is imported."""

import argparse
from collections.abc import Callable, Mapping

from shardproof.harness.dense_model import SUBJECT

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
    "resume": "a run that torch's DCP saves and that goes on at another layout",
    "split-backward": "zero-bubble schedules of torch with a tied table and data ranks",
    "quantised": "gradients as int8 and weights as fp8 on the wire, with scales",
    "refit": "a trainer and an inference layout with fused weights, as two programs",
    "compiled": "torch.compile under tp, DDP and FSDP2",
    "trainer": "TrainingArguments and a Trainer of Hugging Face",
    "hf": "a Hugging Face model under its own tp plan",
    "deepspeed": "DeepSpeed's ZeRO",
    "megatron": "Megatron-Core's GPTModel",
    "megatron-training": "Megatron-Core's pipeline, optimizers and experts",
    "torchtitan": "torchtitan's models under its parallelize functions",
    "torchtitan-recipe": "a configuration of torchtitan and its Trainer",
}
"""Subjects that can be written -> what each shows."""
_NEW_SUBJECT = "Write a subject that runs: a model, its truth and its words. No file is longer than 120 lines."
SLICED = "shardproof.parallel.slicing.words:Sliced"
"""The name of the class that reads the words of a slice."""


def add_others(add: Callable[..., argparse.ArgumentParser], truth: str, timeout: str) -> None:
    """Add every command but `run`. `truth` and `timeout` are the meanings of options that `run` has too."""
    record = add("record", help="record a training program as it is: torchrun, accelerate launch, python ...")
    record.usage = "shardproof record [options] -- COMMAND ..."
    record.description = "Run a command and record the collectives of every rank that it starts into one run folder."
    record.epilog = "example: shardproof record --steps 10:20 -- torchrun --nproc-per-node 4 train.py --lr 0.1"
    add_options(record)
    record.add_argument("program", nargs=argparse.REMAINDER, metavar="COMMAND ...", help="the command, after --")
    _add_parity(add("parity", help="two launches of one program: does the second train what the first does"))
    _add_read(add("read", help="traces of a job as a run folder: torch profiler, Flight Recorder, nsys"))
    _add_hang(add("hang", help="after a hang: which ranks diverge from the others, at which call, module and line"))
    _add_shown(add)
    _add_compare(add("compare", help="regression report of two runs; one run alone: its modes against each other"))
    _add_faults(add("faults", help="plant bugs one at a time: which check notices which"), truth, timeout)
    _add_predict(add("predict", help="memory, calls and bytes at any size, without running it; whether it fits"))
    _add_slice(add("slice", help="what every rank holds of each tensor that DeepSpeed slices; cut a checkpoint"))
    _add_checkpoint(add("checkpoint", help="compare two checkpoints of any layouts, tensor by tensor"))
    expect = add("expect", help="what a case of a run did, as terms to paste into a subject")
    expect.description = "Print the calls that a run recorded as Python: a function expected(case) of shardproof.Terms."
    expect.epilog = "example: shardproof expect runs/latest --short"
    expect.add_argument("run", metavar="RUN", help="run folder, such as runs/latest")
    expect.add_argument("case", nargs="*", default=[], metavar="CASE", help="the case, where the run has several")
    expect.add_argument("--short", action="store_true", help="one term for all calls of an op over an axis")
    names = add("names", help="the names, shapes and dtypes that a subject may return in a case")
    names.description = "Compute the truth of a case and print its names, by kind and in the order of computation."
    names.epilog = 'example: shardproof names "mode=tp tp=2 layers=1"'
    names.add_argument("case", nargs="+", metavar="CASE", help="one case, key=value words (help case)")
    names.add_argument("--subject", default=SUBJECT, metavar="M:O", help=f"whose truth and words ({SUBJECT})")
    names.add_argument("--truth", metavar="M:O|alone", help=truth)
    new = add("new-subject", help="write a subject that runs, to start from")
    new.description = _NEW_SUBJECT
    new.epilog = "example: shardproof new-subject my_model.py --like dtensor"
    new.add_argument("file", metavar="FILE", help="the new file, such as my_model.py")
    new.add_argument("--like", choices=LIKE, default="mlp", help="what it is made of (mlp: by hand)")
    bench = add("bench", help="the performance table, measured here")
    bench.description = "Measure the performance table on this machine."
    bench.add_argument("--out", metavar="DIR", help="folder of bench.csv (runs/bench)")
    bench.add_argument("--quick", action="store_true", help="without the proof at real widths and the recorded program")
    doctor = add("doctor", help="what this machine offers, what would be skipped, and why")
    doctor.description = "Print what this machine offers, what would be skipped, and why."
    _add_help(add("help", help="`help case`: every word of a CASE; `help slice`; `help calls CASE`: its collectives"))


def _add_help(about: argparse.ArgumentParser) -> None:
    about.description = "Print every word of a case or of a slice, or every collective of a case with its reason."
    about.epilog = 'example: shardproof help calls "mode=tp-sp tp=4"'
    about.add_argument(
        "topic",
        nargs="?",
        choices=("case", "slice", "calls"),
        metavar="case|slice|calls",
        help="words, or the calls of a CASE; without it, all commands",
    )
    about.add_argument("case", nargs="*", default=[], metavar="CASE", help="of `help calls`: key=value words")
    about.add_argument("--subject", default=SUBJECT, metavar="M:O", help=f"whose calls ({SUBJECT})")
    about.add_argument("--markdown", action="store_true", help="as a page of markdown, such as docs/case.md")


def _add_parity(parity: argparse.ArgumentParser) -> None:
    parity.usage = "shardproof parity [options] -- COMMAND A -- COMMAND B"
    parity.description = (
        "Launch two commands, record what their ranks' tensors are in the first steps, and hold the second launch "
        "against the first: samples, initial weights, outputs, losses, gradients, updates."
    )
    parity.epilog = (
        "example: shardproof parity -- torchrun --nproc-per-node 1 train.py -- torchrun --nproc-per-node 4 train.py"
    )
    parity.add_argument("--steps", default="2", metavar="N", help="steps of the optimizer that are compared (2)")
    parity.add_argument("--dtype", metavar="float64", help="run both in float64 where the programs allow that")
    engines = ("launcher", "inproc")
    threads = "who starts the ranks; inproc: those of torchrun are threads of one process (launcher)"
    parity.add_argument("--engine", choices=engines, default="launcher", help=threads)
    parity.add_argument("--same-init", action="store_true", help="give launch B the initial weights of launch A")
    parity.add_argument("--no-dropout", action="store_true", help="dropout drops nothing, in both launches")
    parity.add_argument(
        "--budget",
        metavar="GIB",
        help="memory for a rank's values of a step (2); the largest that do not fit are left out",
    )
    parity.add_argument("--timeout", default="300", metavar="SECONDS", help="longest time of one launch (300)")
    parity.add_argument("--out", default="runs", metavar="DIR", help="where run folders go (runs)")
    parity.add_argument("--json", action="store_true", help="the result as one JSON object on stdout")
    parity.add_argument("program", nargs=argparse.REMAINDER, metavar="-- COMMAND A -- COMMAND B", help="both commands")


def _add_shown(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Add the commands that show one run again: its tables, its page, its trace."""
    show = add("show", help="the tables of a run again")
    page = add("page", help="one self-contained HTML file of a run")
    trace = add("trace", help="a run as Chrome/Perfetto JSON, one process a rank")
    show.description = "Print the tables of a run again."
    show.epilog = "example: shardproof show runs/latest"
    page.description = "Write one HTML file of a run that opens offline."
    page.epilog = "example: shardproof page runs/latest -o report.html"
    for command in (show, page, trace):
        command.add_argument("run", nargs="?", default="runs/latest", metavar="RUN", help="run folder (runs/latest)")
    page.add_argument("-o", dest="output", metavar="FILE", help="where to write it (report.html in the run folder)")
    page.add_argument("--markdown", action="store_true", help="a comment for a pull request, printed without -o")
    trace.description = "Write a run as one Chrome/Perfetto JSON, or as torch profiler files."
    trace.epilog = "example: shardproof trace runs/latest --kineto"
    trace.add_argument("-o", dest="output", metavar="FILE", help="where to write it (trace.json there); .gz is packed")
    trace.add_argument("--kineto", action="store_true", help="a folder with a torch profiler file a rank, for HTA")


def _add_hang(hang: argparse.ArgumentParser) -> None:
    hang.description = "Compare what every rank did last. Exit status 1 when ranks diverge, 0 when none does."
    hang.epilog = "example: shardproof hang runs/latest   or   shardproof hang /tmp/nccl_trace_rank_*"
    hang.add_argument("dumps", nargs="+", metavar="DUMP", help="a run folder of `record`, or Flight Recorder files")


def _add_read(read: argparse.ArgumentParser) -> None:
    read.description = (
        "Read what the profiler of a job wrote, one file a rank, into a run folder, and show it. With a case: hold "
        "every call against its closed form; exit status 1 when they differ."
    )
    read.epilog = 'example: shardproof read traces/ --steps 10:12 --case "mode=tp tp=8"'
    read.add_argument("files", nargs="+", metavar="FILE", help="traces (.json, .json.gz, .pickle, .sqlite), or folders")
    meant = read.add_mutually_exclusive_group()
    meant.add_argument("--case", metavar="CASE", help="the layout that was meant, in key=value words (help case)")
    meant.add_argument("--subject", nargs=2, metavar=("M:O", "CASE"), help="the same in words of a subject")
    read.add_argument("--steps", metavar="FIRST:END", help="these steps of the profiler; END is not included (all)")
    read.add_argument("--rank-regex", metavar="REGEX", help="where the rank stands in a file's name (rank[-_.]?(\\d+))")
    read.add_argument("--out", default="runs", metavar="DIR", help="where run folders go (runs)")


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
        help="the largest change of events, calls, bytes or memory (a number or a percentage), or of time or wall (a "
        "percentage) that passes; events:0 when no limit is given",
    )
    compare.add_argument("--save-baseline", metavar="NAME", help="store NEW (or BASE alone) under this name")
    compare.add_argument("--baselines", default="baselines", metavar="DIR", help="where baselines are (baselines)")
    compare.add_argument("-o", dest="output", metavar="FILE", help="write one self-contained HTML page there instead")
    compare.add_argument("--markdown", action="store_true", help="a comment for a pull request, printed without -o")
    compare.add_argument("--json", action="store_true", help="everything as one JSON object")
    values = compare.add_argument_group("values", "two recordings of `record --values`, NEW held against BASE")
    values.add_argument("--values", action="store_true", help="compare what their tensors were, as `parity` does")
    values.add_argument(
        "--control", action="append", default=[], metavar="FOLDER", help="BASE recorded again with --perturb SEED"
    )
    values.add_argument("--out", default="runs", metavar="DIR", help="where run folders go (runs)")


def _add_faults(faults: argparse.ArgumentParser, truth: str, timeout: str) -> None:
    faults.description = (
        "Plant bugs one at a time and print which checks notice each. Our own implementation gets every mutant, "
        "variant and fault in every mode. Another subject gets the faults of its collectives, which need no source. "
        "With a CASE, the faults of that case's collectives are planted."
    )
    faults.add_argument("cases", nargs="*", metavar="CASE", help="key=value words in quotes (help case)")
    faults.add_argument("--subject", default=SUBJECT, metavar="M:O", help=f"the code to verify ({SUBJECT})")
    faults.add_argument("--truth", metavar="M:O|alone", help=truth)
    faults.add_argument("--quick", action="store_true", help="one mode a mutant and few faults: minutes on two cores")
    part = faults.add_mutually_exclusive_group()
    part.add_argument("--held-back", action="store_true", help="only the mutants that no rule of diagnosis has seen")
    part.add_argument("--open", action="store_true", help="everything but the held-back mutants")
    faults.add_argument(
        "--field",
        action="store_true",
        help="only bugs of public issues (docs/catalogue.md), each beside the same case without it",
    )
    faults.add_argument(
        "--dtype",
        choices=("float64", "float32", "bfloat16"),
        help="dtype of the cases (drawn without it); a bug that shows in one dtype alone keeps that",
    )
    faults.add_argument(
        "--emit-repro",
        nargs=2,
        metavar=("NAME|all", "DIR"),
        help="plant nothing; write open bugs as scripts of their own",
    )
    faults.add_argument("--timeout", default="60", metavar="SECONDS", help=timeout)
    faults.add_argument("--out", default="runs", metavar="DIR", help="where run folders go (runs)")
    faults.add_argument("--json", action="store_true", help="the figures as one JSON object on stdout")


def _add_predict(predict: argparse.ArgumentParser) -> None:
    predict.description = (
        "Predict cases by closed form and dry run. Without mode=, all modes are compared; without dtype=, "
        "parameters are bfloat16; without optimizer=, AdamW trains in mixed precision (18 bytes a parameter)."
    )
    predict.epilog = 'example: shardproof predict "preset=llama3-405b mode=tp-sp tp=8 dp=2048"'
    predict.add_argument("cases", nargs="+", metavar="CASE", help="one case each, key=value words in quotes")
    predict.add_argument("--memory", default="80", metavar="GIB", help="the memory of a rank's device, in GiB (80)")
    predict.add_argument("--subject", default=SUBJECT, metavar="M:O", help=f"implementation to predict ({SUBJECT})")
    predict.add_argument("--json", action="store_true", help="the result as JSON on stdout, and nothing else there")


def _add_checkpoint(checkpoint: argparse.ArgumentParser) -> None:
    checkpoint.description = (
        "Compare two checkpoints of any layouts, full tensor by full tensor: parameters, the optimizer's states, "
        "counters, random streams. Exit status 1 when they differ."
    )
    checkpoint.epilog = "example: shardproof checkpoint before after --tensor '*.exp_avg'"
    checkpoint.add_argument("a", metavar="A", help="folder of a checkpoint: torch's, Hugging Face's or Megatron-Core's")
    checkpoint.add_argument("b", metavar="B", help="the one to compare with it")
    checkpoint.add_argument("--tensor", default="*", metavar="KEY", help="only these keys, * and ? as in file names")
    checkpoint.add_argument("--json", action="store_true", help="the result as JSON on stdout, and nothing else there")


def _add_slice(slices: argparse.ArgumentParser) -> None:
    slices.description = (
        "Cut a model over ranks as DeepSpeed does, without its known bugs, and print what each rank holds."
    )
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


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of recording; what follows them is the program."""
    parser.add_argument(
        "--steps", metavar="FIRST:END", help="record these steps; END is not included (all; with --values 0:2)"
    )
    parser.add_argument("--profile", metavar="torch,nsys", help="profilers to run beside; torch needs --steps")
    parser.add_argument("--tokens", metavar="N", help="tokens of all ranks in a step, for tokens a second")
    parser.add_argument("--case", metavar="WORDS", help="the layout as a case, to hold calls and bytes against")
    parser.add_argument(
        "--silence",
        default="60",
        metavar="SECONDS",
        help="a rank without any event for so long writes down where it stands, for `shardproof hang` (60)",
    )
    values = parser.add_argument_group("values", "what every rank's tensors were, beside the calls")
    values.add_argument("--values", action="store_true", help="record them: parameters, outputs, gradients, updates")
    values.add_argument(
        "--budget",
        metavar="GIB",
        help="memory for a rank's values of a step (2); the largest that do not fit are left out",
    )
    values.add_argument("--dtype", metavar="float64", help="run the program in float64 where it allows that")
    values.add_argument("--no-dropout", action="store_true", help="dropout drops nothing")
    values.add_argument("--same-init", metavar="FOLDER", help="begin with the initial weights of this recording")
    values.add_argument("--perturb", metavar="SEED", help="move every operator's result by a random part of rounding")
    parser.add_argument("--out", default="runs", metavar="DIR", help="where run folders go (runs)")
