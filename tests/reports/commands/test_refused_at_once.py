"""Refused requests: a wrong word before anything slow is loaded, a subject that cannot be imported in one sentence."""

import json
import os
from pathlib import Path

import pytest

from shardproof import record
from shardproof.harness.engines.processes.forked.pool import PoolEngine
from shardproof.harness.errors import RequestError
from shardproof.harness.running.proof import prove
from shardproof.harness.subject import case_of, resolve_subject
from tests.harness.command_line import TOY, CommandLine
from tests.shardproof.test_public_names import python

SLOW = ("torch", "torch.distributed.tensor", "numpy", "pandas", "matplotlib", "rich", "hypothesis")
PROGRAM = f"""
import contextlib, io, json, sys
from shardproof.__main__ import main
for words in json.load(sys.stdin):
    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        status = main(words)
    print(json.dumps([status, err.getvalue(), [name for name in {SLOW} if name in sys.modules]]))
"""
PRINTED = (["help", "case"], ["help", "slice"], ["--help"], ["run", "--help"], ["--version"])
REFUSED = {
    "explain": "invalid choice: 'explain'",
    "doctor --fast": "unrecognized arguments: --fast",
    "run mode=unknown": "mode=unknown: is not a known word",
    "run tp=3": "heads=8: must be a multiple of tp=3; legal: tp=2",
    "run colour=red": "colour=red: is not a word of the case language",
    "run --modes tp,unknown": "modes=unknown: no case has this mode; legal: all, or some of tp,tp-sp,",
    "run --modes tp tp=2": "modes=tp: chooses among the default cases",
    "run --deep tp=2": "deep: chooses more default cases",
    "run --engine steam": "invalid choice: 'steam'",
    "run --subject nowhere.at.all:subject": "there is no module 'nowhere'",
    "run --timeout soon": "timeout=soon: must be a number of seconds",
    "run --variant unknown": "variant=unknown: is not a known variant",
    "run --profile vtune": "profile=vtune: is not a profiler of cases",
    "run --profile torch --profile-steps 3": "profile-steps=3: must be FIRST:END",
    "run --profile torch --profile-steps 0:9 steps=1": "has 1 step, counted from 0; legal: 0:1",
    "run --profile-steps 0:1": "there is no --profile",
    "run --data nowhere.txt": "data=nowhere.txt: nowhere.txt: cannot be opened",
    "run --emit-repro nowhere/x.py": "emit-repro=nowhere/x.py: cannot be written",
    "predict tp=2 --memory 0": "memory=0: must be the GiB of a rank, a positive number; legal: --memory 80",
    "predict tp=2 --memory much": "memory=much: must be the GiB of a rank",
    "predict tp=2 --subject nowhere:subject": "there is no module 'nowhere'",
    "slice family=gpt2": "slice 'family=gpt2': family=gpt2: is not a known word; legal: opt|",
    "help case tp=2": "case 'tp=2': help case takes no case; legal: help calls CASE",
    "show nowhere": "run nowhere: no such folder; legal: a folder that `shardproof run` wrote, such as runs/latest",
    "compare nowhere": "run nowhere: no such folder",
    "compare nowhere there": "no such run folder and no baseline of this name",
    "compare nowhere there --fail sizes:0": "fail=sizes:0: must be WHAT:LIMIT",
    "compare nowhere there --save-baseline a/b": "baseline=a/b: must be a name",
    "faults --timeout 0": "timeout=0: must be a number of seconds",
    "faults --subject nowhere:subject": "there is no module 'nowhere'",
}
"""Words of a command, as they are split at blanks -> what the message holds."""


def test_neither_help_nor_a_wrong_request_loads_anything_slow(tmp_path: Path) -> None:
    """After each of these commands in one interpreter; the last ones import torch, which is seen, and our decoder,
    which loads no DTensor: it takes half as long as torch.
    """
    (tmp_path / "slow.py").write_text("import torch\n")
    importing = [["run", "--subject", "slow:subject"], ["help", "calls", "tp=2"]]
    requests = [*PRINTED, *(words.split() for words in REFUSED), *importing]
    done = python(tmp_path, "-c", PROGRAM, stdin=json.dumps(requests))
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found[: len(PRINTED)] == [[0, "", []]] * len(PRINTED), done.stderr
    *refused, (last, _, seen), (status, _, slow) = found[len(PRINTED) :]
    assert (status, "torch.distributed.tensor" in slow) == (0, False)
    for (words, message), (status, err, slow) in zip(REFUSED.items(), refused, strict=True):
        assert (status, slow) == (2, []), words
        assert message in err and err.count("\n") == 1, words
    assert last == 2 and "torch" in seen


BROKEN = {
    "syntax": ("def subject(case, device)\n", "SyntaxError: expected ':' (broken_syntax.py, line 1)"),
    "missing": ("import no_such_module\n", "No module named 'no_such_module'"),
    "missing_below": ("import os.no_such_module\n", "No module named 'os.no_such_module'"),
    "raising": ("raise ValueError('wrong\\nin two lines')\n", "ValueError: wrong ..."),
    "leaving": ("import sys\nsys.exit(3)\n", "SystemExit: 3"),
    "empty": ("", "it defines nothing; legal: subject(case, device) in it, as `shardproof new-subject FILE` writes"),
}
IN_A_CHILD = """
import multiprocessing, os, sys
import torch
import torch.distributed as dist

PARENT = os.environ.get("PARENT")
CHILD = PARENT != str(os.getpid()) if PARENT else multiprocessing.parent_process() is not None or sys.argv[0] == "-c"
if CHILD:
    {how}

def subject(case, device):
    loss = torch.ones((), dtype=torch.float64) / dist.get_world_size()
    dist.all_reduce(loss)
    return {{"loss/0": loss}}

subject.words, subject.truth = {{"width": 4}}, "alone"
"""


@pytest.mark.parametrize("how", BROKEN)
def test_what_cannot_be_imported_is_one_sentence(shardproof_here: CommandLine, how: str) -> None:
    program, told = BROKEN[how]
    Path(f"broken_{how}.py").write_text(program)
    for words in (("run", "tp=2", "--engine", "dry"), ("faults",)):
        assert told in shardproof_here.refused(*words, "--subject", f"broken_{how}:subject")


@pytest.mark.usefixtures("shardproof_here")
def test_what_only_a_rank_cannot_import_is_one_sentence(pool: PoolEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARENT", str(os.getpid()))
    Path("broken_on_ranks.py").write_text(IN_A_CHILD.format(how="import no_such_module"))
    subject = resolve_subject("broken_on_ranks:subject")
    told = "broken_on_ranks fails on import: No module named 'no_such_module'"
    with pytest.raises(RequestError, match=told) as caught:
        prove(case_of("tp=2", subject), subject, pool)
    assert "\n" not in str(caught.value)


@pytest.mark.deep("ten CPU seconds: a rank on processes says the same above")
def test_what_only_a_child_cannot_import_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(IN_A_CHILD.format(how="sys.exit(3)"))
    done = python(tmp_path, "-m", "shardproof", "faults", "tp=2", "--subject", "broken:subject")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "name 'broken:subject': broken fails on import: " in done.stderr


@pytest.mark.deep("eleven CPU seconds")
def test_what_launched_ranks_cannot_import_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(IN_A_CHILD.format(how="import no_such_module"))
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "shardproof", "run", "tp=2")
    done = python(tmp_path, *launcher, "--engine", "torchrun", "--subject", "broken:subject")
    ours = done.stderr.partition("torch/distributed/elastic")[0]
    assert "broken fails on import: No module named 'no_such_module'" in ours and "Traceback" not in ours, done.stderr


def test_own_words_without_cases_run_the_cases_that_are_given(shardproof_here: CommandLine) -> None:
    Path("own_words_alone.py").write_text(IN_A_CHILD.format(how="pass"))
    status, out, _ = shardproof_here("run", "tp=2 width=5", "--subject", "own_words_alone:subject")
    assert status == 0 and "tp=2 width=5" in out
    rule = "has words of its own, so a case must be given, or named in its attribute cases"
    assert rule in shardproof_here.refused("run", "--subject", "own_words_alone:subject")


def test_a_subject_that_returns_nothing_is_told_once(shardproof_here: CommandLine) -> None:
    for case in ("tp=1", "tp=2"):
        status, out, _ = shardproof_here("run", f"{case} layers=1 seq=8", "--subject", f"{TOY}empty")
        assert status == 1 and out.count("fail: ") == 1, out
        told = out.partition("fail: ")[2]
        assert "what:   nothing checkable: it returned nothing; the truth has" in told
        assert "\ncauses: no name that the subject returns is one of the truth's\n" in told


@pytest.mark.usefixtures("shardproof")
def test_a_program_that_cannot_begin_is_one_sentence_of_record(capsys: pytest.CaptureFixture[str]) -> None:
    Path("broken.py").write_text("def subject(case, device)\n")
    for words, told in {
        ("nowhere.py",): "program=nowhere.py: cannot be opened (No such file or directory)",
        ("broken.py",): "program=broken.py: SyntaxError: expected ':' (broken.py, line 1)",
        ("-m", "nowhere.at_all"): "program=nowhere.at_all: there is no module 'nowhere'",
    }.items():
        status, err = record.main(words), capsys.readouterr().err
        assert status == 2 and err.count("\n") == 1 and told in err, words
    assert not Path("runs").exists()
