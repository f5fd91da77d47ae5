"""Every command that a page shows is run as it stands, here or by a test that is named, or has a reason why not.

A command is a line of a block of code; `# exit status N` behind it states another one than 0. A plain run of a case of
ours goes on shapes alone, which says whether the case is legal and what it sends; its numbers are those of cases of the
default run, and the profile `deep` runs it as it stands. In running text, `shardproof COMMAND --option` names a command
and options that exist, and `python -m MODULE` a module.
"""

import importlib
import re
import shlex
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest

from shardproof.pytest_options import OPTIONS
from shardproof.reports.commands import cli
from tests import ROOT
from tests.harness.traces.nccl_trace import write_job
from tests.project.prose import CODE, FENCED
from tests.project.test_documents import PAGES

SHOWN = re.compile(r"(?:cd \S+; )?(?:\.venv/bin/)?(?:shardproof|torchrun|pytest|make|python|pip) \S.*")
FENCED_ARE_RUN = ("README.md", "docs/verify.md")
"""Pages whose fenced blocks tests/project/test_documents.py runs in their order."""
_RECORDED = "four processes of the reader's program; two are run by tests/harness/programs/test_recorded_programs.py"
_PARITY = "a script of the reader's own; ours: tests/reports/commands/test_parity.py"
_VALUES = "a script of the reader's own; ours: tests/harness/programs/test_recorded_values.py"
_GATE = "run in the profile `deep` by tests/harness/programs/test_recorded_programs.py"
_RECIPE = "steps of docs/shardproof.yml: tests/project/test_installed.py"
_MEGATRON = "run in the profile `deep` by tests/suites/test_foreign_subjects.py"
_TRANSFORMERS = "a folder of transformers: tests/parallel/checkpoints/test_checkpoint_exchange.py"
_MEGATRON_FOLDER = "a folder of Megatron-Core: tests/parallel/checkpoints/test_megatron_weights.py"
NOT_RUN = {
    "make run": "the default run: tests/reports/pages/test_default_run.py",
    "make test": "the suite itself",
    "python -m shardproof.suites.mutants.field": "writes the page itself: tests/suites/test_catalogue.py",
    "shardproof faults --field": "half an hour: two bugs are measured by tests/suites/test_catalogue.py",
    "python -m bench.systems": "half an hour; its quick cells: tests/suites/test_foreign_subjects.py",
    ".venv/bin/pytest tests/harness/checking": "a part of the suite itself",
    "torchrun --nnodes 2": "two machines",
    "torchrun --nproc-per-node 4": _RECORDED,
    "shardproof parity -- python train.py": _PARITY,
    "shardproof compare a/latest b/latest --values": _PARITY,
    "shardproof record --values": _VALUES,
    "shardproof record --steps 10:20": _RECORDED,
    "shardproof record --steps 2:4": _GATE,
    "shardproof compare runs/latest --save-baseline train": _GATE,
    "shardproof compare train runs/latest": _GATE,
    "--subject my_package.my_module:subject": _RECIPE,
    "shardproof compare runs/latest --save-baseline main": _RECIPE,
    "shardproof trace runs/latest": "a folder of `record`: tests/reports/commands/test_trace.py",
    "shardproof trace runs/latest --kineto": "the same: tests/reports/commands/test_kineto_files.py",
    "shardproof hang runs/latest": "a folder that a hang leaves: tests/harness/hangs",
    "shardproof hang /tmp/nccl_trace_rank_*": "files of NCCL: tests/harness/hangs",
    "--subject shardproof.suites.subjects.mcore_experts:subject": _MEGATRON,
    "pytest --pyargs shardproof.suites.test_checkpoints": "draws cases for minutes: tests/suites/test_drawing.py",
    '"preset=opt-125m tp=4" --check model.safetensors': "a real model; a toy: tests/reports/commands/test_slicing.py",
    "load=/tmp/llama": _TRANSFORMERS,
    "/tmp/checkpoint /tmp/llama": _TRANSFORMERS,
    "load=/tmp/megatron": _MEGATRON_FOLDER,
    "/tmp/checkpoint /tmp/megatron": _MEGATRON_FOLDER,
}
"""Part of a command -> what it needs that no test gives it, and the test that does the like."""
COSTLY = {
    'shardproof predict "preset=llama3-405b': "10 CPU seconds",
    'shardproof predict "preset=deepseek-v3': "20 CPU seconds",
    'shardproof predict "preset=mixtral-8x7b': "10 CPU seconds",
    "--engine pool": "20 CPU seconds: a pool of its own",
}
"""Part of a command -> why it runs only in the profile `deep`."""
PLAIN = re.compile(r'shardproof run "(?!.*(?:save|load|experts)=)[^"]*"(?: "[^"]*")*')
"""A run of cases of ours, and nothing else; learned routing looks at numbers."""
SUBJECT = re.compile(r"--subject (shardproof\.suites\.subjects\.\w+):")


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def commands(page: Path) -> list[str]:
    """The commands of the blocks of code of a page: each on one line, comments left out but for exit statuses."""
    text = page.read_text().replace("\\\n", " ")
    blocks = "" if named(page) in FENCED_ARE_RUN else "\n".join(block for _, block in FENCED.findall(text))
    indented = "\n".join(line[4:] for line in FENCED.sub("\n", text).splitlines() if line.startswith("    "))
    lines = [re.sub(r"  +#(?! exit status).*", "", line).strip() for line in f"{blocks}\n{indented}".splitlines()]
    return [line for line in lines if SHOWN.fullmatch(line)]


def run(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run one command of a page in a folder that stands for /tmp too, and compare its exit status."""
    command, _, status = line.replace("/tmp/", f"{folder}/").partition("  # exit status ")
    monkeypatch.chdir(folder)
    if command.startswith("cd "):
        place, _, command = command.removeprefix("cd ").partition("; ")
        monkeypatch.chdir(ROOT / place)
        monkeypatch.syspath_prepend(ROOT / place)
        command += f" --out {folder}"
    program, *words = shlex.split(command)
    assert Path(program).name == "shardproof", f"{line}: who runs it?"
    words += ["--when", "0"] if words[0] == "run" and status else []  # what is printed is compared elsewhere
    assert cli.main(words) == int(status or 0), line


def lacking(line: str) -> str:
    """The package that the subject of a command imports, where it is not installed."""
    if named_there := SUBJECT.search(line):
        try:
            with warnings.catch_warnings(action="ignore"):  # other packages' own
                importlib.import_module(named_there[1])
        except ModuleNotFoundError as problem:
            package = str(problem.name).partition(".")[0]
            if package == "shardproof":
                raise
            return package
    return ""


def here(page: Path, *, costly: bool = False) -> list[str]:
    """The commands of a page that are run here, those that cost much or all others."""
    lines = [line for line in commands(page) if not any(part in line for part in NOT_RUN)]
    return [line for line in lines if any(part in line for part in COSTLY) is costly]


@pytest.mark.deep("a minute: layouts of large models, a pool")
@pytest.mark.parametrize("page", [page for page in PAGES if here(page, costly=True)], ids=named)
def test_every_costly_command_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for line in here(page, costly=True):
        run(line, tmp_path, monkeypatch)


@pytest.mark.parametrize("page", [page for page in PAGES if here(page)], ids=named)
def test_every_command_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    deep = request.config.getoption("hypothesis_profile", None) == "deep"
    monkeypatch.setattr("os.cpu_count", lambda: 1)  # no second process, which would load torch once more
    (tmp_path / "corpus.txt").write_text("Words to train on. " * 200)
    if page.name == "traces.md":
        write_job(tmp_path / "traces")
    packages = {line: lacking(line) for line in here(page)}
    for line in (line for line, package in packages.items() if not package):
        run(line if deep or not PLAIN.fullmatch(line) else f"{line} --engine dry", tmp_path, monkeypatch)
        if " save=/tmp/checkpoint" in line:
            run('shardproof run "tp=2 optimizer=adamw lr=0.01 seed=1 save=/tmp/other"', tmp_path, monkeypatch)
    if left := sorted({*filter(None, packages.values())}):
        pytest.skip(f"the other commands have run; needs {', '.join(left)} (extra `peers`)")


def test_what_is_not_run_has_a_reason_that_holds() -> None:
    shown = [line for page in PAGES for line in commands(page)]
    assert [part for part in (*NOT_RUN, *COSTLY) if not any(part in line for line in shown)] == [], "on no page"
    paths = re.findall(r"tests/[\w/.]+", " ".join(NOT_RUN.values()))
    assert [path for path in paths if not (ROOT / path).exists()] == []


def spans(page: Path) -> list[list[str]]:
    """The commands that the text of a page names, in words."""
    found = [span.strip("`").split() for span in CODE.findall(FENCED.sub("", page.read_text()))]
    return [words for words in found if len(words) > 1 and words[0] in ("shardproof", "python", "pytest", "make")]


def test_every_command_in_the_text_of_a_page_exists(capsys: pytest.CaptureFixture[str]) -> None:
    suites = {f"--{option.word}" for option in OPTIONS} | {"--pyargs"}
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named_there = [(words, named(page)) for page in PAGES for words in spans(page)]
    assert {words[0] for words, _ in named_there} == {"shardproof", "python", "pytest", "make"}
    for words, page in named_there:
        offered, told = suites, f"{page}: {' '.join(words)}"
        if words[0] == "make":
            assert words[1] in targets, told
        elif words[:2] == ["python", "-m"]:
            assert find_spec(words[2]), told
        elif words[0] == "shardproof" and words[1] != "COMMAND":
            assert cli.main([words[1], "--help"]) == 0, told
            offered = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
        own = words[: words.index("--")] if "--" in words else words  # behind it stand commands of the reader
        options = set(re.findall(r"(?<!\S)\[?(--[a-z-]+)", " ".join(own)))
        assert words[0] not in ("shardproof", "pytest") or words[1] == "COMMAND" or options <= offered, told


def test_a_command_is_seen_in_every_form(tmp_path: Path) -> None:
    page = ROOT / "docs" / "commands.md"
    assert any("--nnodes 2" in line and "--engine torchrun" in line for line in commands(page)), "a line that goes on"
    assert "shardproof checkpoint /tmp/checkpoint /tmp/other  # exit status 1" in commands(ROOT / "docs/checkpoints.md")
    assert 'shardproof run "tp=2 cp=2"' in commands(ROOT / "docs/splitting.md"), "without its comment"
    with pytest.raises(AssertionError, match="tp=two"), pytest.MonkeyPatch.context() as patch:
        run('shardproof run "tp=two"', tmp_path, patch)
