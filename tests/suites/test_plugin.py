"""The pytest plugin in CI: options, known failures, `--faults`, ledgers as gates, run folders, what CI reads.

A wrong request is refused at the start of a session; its header names the request.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from shardproof import pytest_plugin
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.errors import RequestError
from shardproof.harness.subject import resolve_subject
from shardproof.pytest_options import OPTIONS
from shardproof.reference.case import Case
from shardproof.reports.commands import cli
from shardproof.reports.stored.frames import load
from shardproof.suites.session.known_failures import Known, read_known_failures, summary_markdown
from shardproof.suites.session.ledger_gate import LedgerGate, file_of
from shardproof.suites.session.prover import Prover
from tests import ROOT
from tests.reports.toy_traffic import CASE
from tests.suites.conftest import SMALL, Session

pytest_plugins = ("pytester",)
pytestmark = pytest.mark.usefixtures("loaded")

TWO = """
def test_right(mode): assert mode
def test_wrong(mode): assert mode == "tp", "what:   grad differs"
"""


@pytest.fixture
def session(bare: Session, pytester: pytest.Pytester) -> Session:
    """A session with the conftest of the suites."""
    pytester.makeconftest("from shardproof.suites.conftest import *  # noqa: F403")
    return partial(bare, "-p", "no:xdist")


@pytest.fixture
def inner(session: Session, pytester: pytest.Pytester) -> Session:
    """A session with two tests a mode."""
    pytester.makepyfile(test_two=TWO)
    return partial(session, "--modes", "tp,isp")


@pytest.fixture
def asked(session: Session, pytester: pytest.Pytester) -> Session:
    """A session with one test for each collective of a subject of `toy_faults`."""
    pytester.makepyfile(test_one="from shardproof.suites.test_faults import *  # noqa: F403")
    return lambda subject, *words: session("--subject", f"tests.suites.toy_faults:{subject}", *words)


# Options


def test_every_option_has_its_twin_in_the_ini_file(session: Session, pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it(mode, pytestconfig): print(mode)")
    pytester.makeini("[pytest]\nshardproof_modes = isp,tp\nshardproof_worlds = 2,3")
    result = session("-v")
    head = "shardproof: subject shardproof.parallel.subject:subject, modes isp,tp, worlds 2,3, engine inproc"
    result.stdout.fnmatch_lines([head])
    result.assert_outcomes(passed=2)
    session("--modes", "msp").assert_outcomes(passed=1)


def test_the_page_on_ci_names_options_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    docs = ROOT / "docs"
    text = (docs / "ci.md").read_text() + (docs / "shardproof.yml").read_text()
    for command in ("run", "compare", "page"):
        cli.main([command, "--help"])
    offered = {*re.findall(r"--[a-z-]+", capsys.readouterr().out), *(f"--{option.word}" for option in OPTIONS)}
    offered |= {"--pyargs", "--junitxml", "--extra-index-url", "--hypothesis-profile"}
    assert set(re.findall(r"--[a-z][a-z-]+", text)) <= offered


def test_workers_leave_a_core_to_every_rank_that_is_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)))
    rows = [(None, "2,6", None), ("inproc", "2,6", None), ("pool", "2,3,4", 4), ("torchrun", "6", 2), ("pool", "64", 1)]
    for engine, worlds, workers in rows:
        options = {"shardproof_engine": engine, "shardproof_worlds": worlds}
        config: Any = SimpleNamespace(
            option=SimpleNamespace(**options),
            getoption=lambda name, default=None, options=options: options.get(name, default),
            getini=lambda name: "inproc",
        )
        assert pytest_plugin.pytest_xdist_auto_num_workers(config) == workers


# Known failures


def known(folder: Path, *entries: tuple[str, str]) -> str:
    text = "".join(f'[[failure]]\ntest = "{test}"\nreason = "{reason}"\n' for test, reason in entries)
    (folder / "known.toml").write_text(text)
    return "--known-failures=known.toml"


def test_a_known_failure_may_fail_and_a_stale_entry_fails(inner: Session, pytester: pytest.Pytester) -> None:
    result = inner(known(pytester.path, ("test_two.py::test_wrong[isp]", "issue 12")), "-rx")
    assert result.ret == 0
    result.assert_outcomes(passed=3, xfailed=1)
    result.stdout.fnmatch_lines(["XFAIL test_two.py::test_wrong?isp? - issue 12*"])
    result = inner(known(pytester.path, ("test_two.py::test_*", "issue 12")))
    result.assert_outcomes(failed=3, xfailed=1)
    result = inner(known(pytester.path, ("test_two.py::test_gone[isp]", "issue 12")))
    result.assert_outcomes(passed=3, failed=2)
    result.stdout.fnmatch_lines(["*known failure test_two.py::test_gone?isp?: no such test is left; legal: remove*"])
    result = inner(known(pytester.path, ("test_two.py::test_gone", "x")), "test_two.py::test_right[tp]")
    result.assert_outcomes(passed=1)


def test_an_entry_means_the_end_of_an_id() -> None:
    entry = Known(test="test_forward.py::test_losses_and_logits[isp]", reason="r")
    assert entry.means("suites/test_forward.py::test_losses_and_logits[isp]")
    assert not entry.means("suites/my_test_forward.py::test_losses_and_logits[isp]")
    assert not entry.means("suites/test_forward.py::test_losses_and_logits[i]"), "no character class"


def test_a_file_that_gives_no_reason_is_refused(tmp_path: Path) -> None:
    path, entry = tmp_path / "known.toml", "[[failure]]\ntest = 'a'"
    nameless = "[[failure]]\ntest = ''\nreason = 'x'"
    for text in (entry, f"{entry}\nreason=' '", nameless, "a = 1", "[", "failure = 'x'", "failure = [1]"):
        path.write_text(text)
        rule = "must have a test and a reason" if text.startswith("[[") else ""
        with pytest.raises(RequestError, match=f"known-failures=.*{rule}.*legal: "):
            read_known_failures(path)
    assert read_known_failures(tmp_path / "nowhere.toml") == ()


def test_a_file_that_is_not_there_is_empty(inner: Session) -> None:
    result = inner("--known-failures=nowhere.toml")
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(["shardproof: *, no known failures, since nowhere.toml is not there"])


def test_a_mode_that_is_not_asked_for_makes_no_entry_stale(inner: Session, pytester: pytest.Pytester) -> None:
    tests = ("test_wrong[isp]", "test_wrong[isp-max all_reduce]", "test_wrong[mode=isp tp=2]")
    option = known(pytester.path, *((f"test_two.py::{name}", "issue 12") for name in tests))
    inner("--modes", "tp", option).assert_outcomes(passed=2)
    assert inner(option, "--modes", "tp,isp").parseoutcomes()["failed"] == 2, "here those two are stale"
    inner(option, "--modes", "tp-sp").assert_outcomes(passed=1, failed=1)
    option = known(pytester.path, ("test_two.py::test_gone[tp-sp]", "issue 12"))
    inner(option, "--modes", "tp").assert_outcomes(passed=2)
    inner(option, "--modes", "tp-sp").assert_outcomes(passed=1, failed=2)


# One test for each collective


def test_faults_are_deselected_unasked_and_skipped_on_processes(asked: Session) -> None:
    result = asked("blind")
    result.assert_outcomes(deselected=1)
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    asked("needed", "--faults", "--engine", "pool").assert_outcomes(skipped=1)


def test_a_blind_spot_fails_and_is_named(asked: Session) -> None:
    result = asked("blind", "--faults", "--case", SMALL)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "what:   nobody notices that max all_reduce tp * is disturbed",
            "where:  mode=tp phase=* module=none call 1 of rank 0",
            "error:  * of * faults are neither killed nor proved equivalent",
            "first:  drop (a collective is left out), *",
            "causes: dead traffic or a blind spot: nothing that is checked depends on the result",
            "repeat: pytest --pyargs shardproof.suites.test_faults --faults"
            ' --subject tests.suites.toy_faults:blind --case "*"',
        ]
    )


def test_the_quick_plan_and_the_ini_file(asked: Session, pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nshardproof_faults = yes")
    asked("needed", "-v").assert_outcomes(passed=1)


def test_what_cannot_be_disturbed_has_its_reason(asked: Session) -> None:
    result = asked("silent", "--faults", "--case", SMALL, "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*takes no case of mode=tp or issues no collective there"])
    result = asked("parted", "--faults", "--case", SMALL)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["the subject does not finish undisturbed:", "*rank 1*"])
    result = asked("needed", "--faults", "--device", "cuda")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*device=cuda: faults are applied on the CPU; legal: *"])
    result.stdout.no_fnmatch_line("*Error*")


def test_junit_and_the_step_summary_hold_the_message(
    inner: Session, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(pytester.path / "summary.md"))
    inner("--junitxml=junit.xml").assert_outcomes(passed=3, failed=1)
    (failure,) = ElementTree.parse(pytester.path / "junit.xml").getroot().iter("failure")
    assert "what:   grad differs" in str(failure.get("message"))
    page = (pytester.path / "summary.md").read_text()
    assert page.startswith("### shardproof: 3 passed, 1 failed\n")
    assert "<summary>test_two.py::test_wrong[isp]</summary>" in page and "what:   grad differs" in page
    long = summary_markdown({"failed": 500}, [("test", "x" * 10_000)] * 500, "about")
    assert len(long.encode()) < 2**20, "no more than GitHub shows"
    assert long.endswith("more failures are in the log.\n")


def test_a_ledger_gate_fails_with_the_difference(tmp_path: Path) -> None:
    with InprocEngine() as engine:
        subject = resolve_subject("tests.reports.toy_traffic:right")
        right = LedgerGate(folder=tmp_path, subject=subject, engine=engine, update=False)
        with pytest.raises(AssertionError, match="no ledger is stored for .*--update-ledgers"):
            right.holds(CASE)
        replace(right, update=True).holds(CASE)
        right.holds(CASE)
        row = r"(?s)new +backward +layers\.1 +all_gather of .* tp .*--update-ledgers"
        with pytest.raises(AssertionError, match=row):
            replace(right, subject=resolve_subject("tests.reports.toy_traffic:gather")).holds(CASE)
        path = tmp_path / file_of(str(CASE))
        stored = path.read_bytes()
        replace(right, update=True).holds(CASE)
        assert path.read_bytes() == stored, "an equal ledger leaves no diff"
        path.write_bytes(stored[:-5])
        with pytest.raises(RequestError, match="is cut"):
            right.holds(CASE)
    files = {file_of(text) for text in ("mode=tp tp=2", "mode=tp tp=2 seed=1", "x" * 200, "x" * 201)}
    assert len(files) == 4 and all(len(file) < 80 for file in files)


def test_a_run_folder_keeps_what_was_proved_once(tmp_path: Path) -> None:
    case = Case.parse(SMALL)
    with Prover.on("shardproof.parallel.subject:subject", "2", out=tmp_path) as prover:
        prover.holds(case, "ledger")
        prover.holds(case, "forward")
    run = load(tmp_path / "latest")
    assert run.notes == ()
    assert list(run.verdicts["check"]) == ["ledger", "forward"]
    assert len(run.cases) == 1
    assert not run.ledger.duplicated(["case", "rank", "call_index"]).any()
    assert (run.summary["calls"] == run.summary["expected_calls"]).all()


THEIRS = "tests.reports.toy_traffic:right"


def that(modes: object) -> Callable[..., dict[str, object]]:
    """A subject with this attribute."""

    def program(case: object, device: object) -> dict[str, object]:
        return {}

    vars(program)["modes"] = modes
    return program


ahead = that(modes=("tp", "ep"))
number = that(modes=7)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--engine foo -n 2", "engine=foo: is not a known engine; legal: inproc pool torchrun dry"),
        ("--worlds 1,x", "worlds=1,x: must be whole numbers above 1, comma separated; legal: --worlds 2,3"),
        ("--device tpu", "device=tpu: must be cpu or cuda; legal: --device cpu"),
        ("--device cuda", "device=cuda: this machine offers no CUDA device; legal: --device cpu"),
        ("--case mode=qq", "case 'mode=qq': mode=qq: is not a known word; legal: tp|tp-sp|mtp|msp|fsp|isp|autotp"),
        ("--subject here", "name 'here': must be written module:object; legal: shardproof.parallel.subject:subject"),
        ("--known-failures bad.toml -n 2", "known-failures=*bad.toml: cannot be read (no TOML: *"),
        ("--hypothesis-profile huge -n 2", "hypothesis-profile=huge: is not a profile; legal: quick default deep"),
        ("--run-dir bad.toml -n 2", "run-dir=*bad.toml: cannot be written; legal: a folder with write permission"),
        ("--ledger-baseline here", "ledger-baseline=*here: no ledgers are stored there; legal: store them once with *"),
        ("--update-ledgers", "update-ledgers: needs the folder to write; legal: --ledger-baseline ledgers"),
        ("--case-timeout no", "case-timeout=no: must be a number of seconds above 0 and at most 604800; legal: *"),
        ("--modes tp,zz", "modes=zz: no case has this mode; legal: all, or some of tp,tp-sp,mtp,msp,fsp,isp,autotp"),
        (f"--subject {__name__}:number", f"subject={__name__}:number: modes=7 must be a tuple of words; legal: *"),
        (f"--subject {__name__}:ahead --modes isp", "modes=isp: *:ahead claims tp, ep; legal: --modes all"),
    ],
)
def test_a_wrong_request_ends_the_session_with_one_sentence(
    outside: Session, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, words: str, message: str
) -> None:
    (pytester.path / "bad.toml").write_text("[")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = outside("shardproof.suites.test_forward", *words.split())
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert [line for line in result.errlines if line.startswith("ERROR")] == result.errlines[:1]
    result.stderr.fnmatch_lines([f"ERROR: {message.replace('[', '[[]')}"])
    assert result.outlines == [], "nothing was collected"


def test_wrong_ini_file_is_refused_as_well(outside: Session, bare: Session, pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nshardproof_worlds = 1")
    assert outside("shardproof.suites.test_forward").ret == pytest.ExitCode.USAGE_ERROR
    pytester.makepyfile("def test_it(): pass")
    theirs = bare("test_wrong_ini_file_is_refused_as_well.py")
    assert theirs.ret == pytest.ExitCode.OK, "a session that is not ours"
    pytester.makeini("[pytest]\nshardproof_faults = maybe")
    result = outside("shardproof.suites.test_forward")
    assert (result.ret, result.outlines) == (pytest.ExitCode.USAGE_ERROR, [])
    assert result.errlines[0] == "ERROR: shardproof_faults: invalid truth value 'maybe'; legal: true or false"


def test_what_is_found_wrong_while_collecting_is_one_sentence(bare: Session, pytester: pytest.Pytester) -> None:
    """A conftest below the folder is met by every worker of xdist, which reports equal sentences of them once."""
    pytester.makeini("[pytest]\nshardproof_worlds = 1")
    folder = pytester.mkpydir("below").joinpath("deep")
    folder.mkdir()
    (folder / "conftest.py").write_text("from shardproof.suites.conftest import *  # noqa: F403")
    (folder / "test_it.py").write_text("def test_it(): pass")
    result = bare()
    result.assert_outcomes(errors=1)
    told = [line for line in result.outlines if "worlds=1" in line and not line.startswith("ERROR")]
    assert told == ["worlds=1: must be whole numbers above 1, comma separated; legal: --worlds 2,3"]


def test_a_mode_that_no_case_can_have_is_left_out_and_told(outside: Session) -> None:
    result = outside("shardproof.suites.test_forward", "--co", "--subject", f"{__name__}:ahead")
    lines = [line.strip() for line in result.outlines if "<Function" in line or line.startswith("shardproof:")]
    assert lines == [
        f"shardproof: subject {__name__}:ahead, modes all, worlds 2,3,4,6, engine inproc, "
        "without ep, which no case can have",
        "<Function test_losses_and_logits[tp]>",
    ]


def collected(result: pytest.RunResult) -> set[str]:
    """The modules of the tests that a session with --co -q has found."""
    assert result.ret == pytest.ExitCode.OK, result.outlines
    return {line.partition("::")[0].removesuffix(".py") for line in result.outlines if "::" in line}


def test_the_suites_are_the_same_tests_for_every_subject(outside: Session) -> None:
    ours, theirs = (
        collected(outside("shardproof.suites", "--co", "-q", *words)) for words in ((), ("--subject", THEIRS))
    )
    assert ours == theirs == {path.stem for path in (ROOT / "suites").glob("test_*.py")} - {"test_faults"}


def test_a_known_failure_is_known_when_its_file_is_named_as_a_module(
    outside: Session, pytester: pytest.Pytester
) -> None:
    names = ("test_losses_and_logits[tp]", "test_gone")
    text = "".join(f'[[failure]]\ntest = "test_forward.py::{name}"\nreason = "issue 12"\n' for name in names)
    (pytester.path / "known.toml").write_text(text)
    result = outside("shardproof.suites.test_forward", "--case", SMALL, "--known-failures", "known.toml")
    result.stdout.fnmatch_lines(["FAILED ::test_losses_and_logits[[]tp] - [[]XPASS(strict)] issue 12"])
    result.stdout.fnmatch_lines(["*known failure test_forward.py::test_gone: no such test is left*"])
    result.assert_outcomes(failed=2)
