"""Parity of published training programs, and of mistakes planted in them: `python -m bench.parity_programs SOURCES`.

SOURCES is a folder with the checked-out repositories that bench.parity_sources names (examples, picotron_tutorial,
build-nanogpt, Megatron-LM) and torchtitan, the unpacked wheel of 0.3.0. Each program is copied, with changed sizes and
devices, and launched on one rank and in its layouts. An edit is a mistake that is substituted into the copy. The
packages that a program imports must be installed, except those that need a GPU.
"""

import argparse
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench.parity_edits import Edit, Substitution
from bench.parity_sources import PROGRAMS, Program
from shardproof.harness.errors import ShardproofError
from shardproof.harness.parity.judging import Further, judge_launches
from shardproof.harness.parity.launching import LaunchRecorder
from shardproof.harness.parity.recorded import Launch
from shardproof.harness.programs.session import ValueOptions
from shardproof.harness.programs.threads.launches import ThreadLaunches, launches_of_threads
from shardproof.harness.running.result import CaseResult

LIMIT_S = 240.0


class Launches:
    """The launches of a program in a copy of its sources, the first one recorded once."""

    def __init__(
        self, program: Program, sources: Path, folder: Path, dtype: str, seed: int, threads: ThreadLaunches | None
    ) -> None:
        self.program, self.folder, self._seed = program, folder, seed
        self._sources = sources / program.folder
        values = ValueOptions(dtype=dtype, dropout=program.dropout)
        self._folders = folder / "recorded"
        self._recorder = LaunchRecorder(
            folder=self._folders, steps=2, timeout_s=LIMIT_S, values=values, threads=threads
        )
        self._known: dict[str, Launch] = {}
        self._copy = self.copy_sources("untouched", ())

    def copy_sources(self, name: str, edits: Sequence[Substitution]) -> Path:
        """Copy the sources, with the program's changes and `edits`. Raises ValueError if a replaced text is missing."""
        copy = self.folder / name
        if self.program.folder:
            shutil.copytree(self._sources, copy)
        for file, text in self.program.files.items():
            (copy / file).parent.mkdir(parents=True, exist_ok=True)
            (copy / file).write_text(text.replace("SEED", str(self._seed)), encoding="utf-8")
        for file, old, new in (*self.program.changes, *edits):
            before = (copy / file).read_text(encoding="utf-8")
            if old not in before:
                raise ValueError(f"{self.program.name}: {file} has no {old!r}; legal: the sources of the edits")
            (copy / file).write_text(before.replace(old, new.replace("SEED", str(self._seed))), encoding="utf-8")
        for word in self.program.prepare:
            word(copy)
        return copy

    def judge_layout(self, layout: str, edit: Edit | None = None) -> CaseResult:
        """The verdicts on a layout, with an edit or without. Raises what a launch raises."""
        name = "untouched" if edit is None else edit.name
        copy = self._copy if edit is None else self.copy_sources(f"{name}-{layout}", edit.substitutions)
        first = self._alone("first")
        second = self._record(f"{layout}-{name}", copy, self.program.layouts[layout])
        further = Further(
            again=lambda: self._alone("again"), perturbed=lambda seed: self._alone(f"perturbed-{seed}", perturb=seed)
        )
        return judge_launches(first, second, further=further)

    def _alone(self, name: str, **options: int) -> Launch:
        if name not in self._known:
            self._known[name] = self._record(name, self._copy, self.program.first, **options)
        return self._known[name]

    def _record(self, name: str, copy: Path, words: str, **options: int) -> Launch:
        before = Path.cwd()
        os.chdir(copy)
        try:
            command = _command_of(words.replace("SEED", str(self._seed)), self.program.script)
            start = str((self._folders / "first").resolve()) if self.program.same_init and name != "first" else ""
            if words == self.program.first:
                return self._recorder.record(name, command, same_init=start, **options)
            return self._recorder.record_same_init(name, command, start)
        finally:
            os.chdir(before)


def _command_of(words: str, script: str) -> list[str]:
    """The command of "RANKS options": by torchrun; for 0 ranks plain Python, for "accelerate:RANKS" accelerate."""
    ranks, *options = words.split()
    if ranks.startswith("accelerate:"):
        launcher = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", ranks.partition(":")[2]]
        launcher += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
        return [sys.executable, *launcher, script, *options]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks] if ranks != "0" else []
    return [sys.executable, *launcher, script, *options]


def describe(result: CaseResult) -> Iterator[str]:
    """What does not pass, its first place and causes."""
    for one in result.verdicts:
        if one.verdict != "pass":
            yield f"  {one.check} {one.verdict}: {one.statement}"
            if one.failure is not None:
                yield f"    first: {one.failure.first}"
                for cause in one.failure.causes[:2]:
                    yield f"    cause: {cause.fact.text}"


def judge_edit(edit: Edit, result: CaseResult) -> Mapping[str, bool]:
    """Whether an edit is found, its first place right, its first cause right, and whether that misleads."""
    failed = [one.failure for one in result.verdicts if one.verdict == "fail" and one.failure is not None]
    if not failed:
        return {"found": False, "place": False, "cause": False, "misleading": False}
    first = failed[0]
    at = first.first
    place = re.fullmatch(edit.place, f"{at.step} {at.phase} {at.region} {at.name}") is not None
    told = first.causes[0].fact.text if first.causes else ""
    right = any(words in told for words in edit.causes)
    return {"found": True, "place": place, "cause": right, "misleading": bool(told) and not right}


def main(words: Sequence[str] | None = None) -> int:
    """Print the verdict of every layout and edit, and counts. Exit status 1: an untouched program does not pass."""
    parser = argparse.ArgumentParser(prog="python -m bench.parity_programs", description=__doc__)
    parser.add_argument("sources", type=Path)
    parser.add_argument("--program", default="", help="a pattern of programs' names")
    parser.add_argument("--layout", default="", help="a pattern of layouts' names, of untouched programs")
    parser.add_argument("--edit", help="a part of an edit's name, for these edits alone; '-' for none")
    parser.add_argument("--dtype", default="float64", choices=("", "float64"))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--engine", default="launcher", choices=("launcher", "inproc"))
    arguments = parser.parse_args(words)
    with launches_of_threads(arguments.engine == "inproc") as threads:
        return _judge_programs(arguments, threads)


def _judge_programs(arguments: argparse.Namespace, threads: ThreadLaunches | None) -> int:
    table: list[tuple[str, Mapping[str, bool]]] = []
    alarms = 0
    for program in (one for one in PROGRAMS if re.search(arguments.program, one.name)):
        with tempfile.TemporaryDirectory() as folder:
            for seed in range(arguments.seeds):
                place = Path(folder) / str(seed)
                launches = Launches(program, arguments.sources, place, arguments.dtype, seed, threads)
                untouched = program.layouts if arguments.edit in (None, "-") else ()
                for layout in (one for one in untouched if re.search(arguments.layout, one)):
                    alarms += _show(f"{program.name}, {layout}, seed {seed}", launches, layout)
                chosen = [edit for edit in program.edits if not seed and (arguments.edit or "") in edit.name]
                for edit in chosen if arguments.edit != "-" else ():
                    title = f"{program.name}, {edit.layout}, {edit.name}"
                    try:
                        result = launches.judge_layout(edit.layout, edit)
                    except ShardproofError as problem:
                        print(f"{title}: {problem}")
                        continue
                    table.append((title, judge_edit(edit, result)))
                    print(f"{title}: {table[-1][1]}", *describe(result), sep="\n", flush=True)
    for word in ("found", "place", "cause", "misleading"):
        print(f"{word}: {sum(row[word] for _, row in table)} of {len(table)}")
    return int(alarms > 0)


def _show(title: str, launches: Launches, layout: str) -> bool:
    """Print the verdict on an untouched program. Returns whether it does not pass."""
    try:
        result = launches.judge_layout(layout)
    except ShardproofError as problem:
        print(f"{title}: {problem}", flush=True)
        return True
    print(f"{title}: {result.verdict}", *describe(result), sep="\n", flush=True)
    return result.verdict != "pass"


if __name__ == "__main__":
    sys.exit(main())
