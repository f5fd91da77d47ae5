"""Request of a session of the suites: refused at its start, named in its head, about no more than its subject."""

from collections.abc import Callable

import pytest

from tests import ROOT
from tests.suites.conftest import SMALL, Session

pytest_plugins = ("pytester",)
pytestmark = pytest.mark.usefixtures("loaded")

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
