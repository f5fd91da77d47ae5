"""`pytest --faults`: a test a collective; one that is needed passes, a blind spot fails and is named."""

from collections.abc import Callable

import pytest

from tests.suites.test_plugin import CONFTEST

pytest_plugins = ("pytester",)
pytestmark = pytest.mark.usefixtures("loaded")

CASE = "mode=tp tp=2 layers=1 hidden=16 heads=2 vocab=24 seq=4 micro=1 steps=1"
BLIND = "test_one.py::test_a_disturbed_collective_is_noticed?tp-max all_reduce tp metric #0?"


@pytest.fixture
def asked(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[..., pytest.RunResult]:
    """A session of its own that runs one case of a subject of `blind_subject`."""
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_one="from suites.test_faults import *  # noqa: F403")
    plain = ("-p", "no:xdist", "-p", "no:cacheprovider")
    return lambda subject, *words: pytester.runpytest_inprocess(
        *plain, "--subject", f"tests.suites.blind_subject:{subject}", *words
    )


def test_unasked_it_is_deselected(asked: Callable[..., pytest.RunResult]) -> None:
    result = asked("blind")
    result.assert_outcomes(deselected=1)
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED


def test_a_blind_spot_fails_and_is_named(asked: Callable[..., pytest.RunResult]) -> None:
    result = asked("blind", "--faults", "--case", CASE)
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "what:   nobody notices that max all_reduce tp * is disturbed",
            "where:  mode=tp phase=* module=none call 1 of rank 0",
            "error:  * of * faults are neither killed nor proved equivalent",
            "first:  drop (a collective is left out), *",
            "causes: dead traffic or a blind spot: nothing that is checked depends on the result",
            'repeat: pytest --pyargs suites.test_faults --faults --subject tests.suites.blind_subject:blind --case "*"',
        ]
    )


def test_the_quick_plan_and_the_ini_file(asked: Callable[..., pytest.RunResult], pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nshardproof_faults = yes")
    asked("needed", "-v").assert_outcomes(passed=1)


def test_without_collectives_there_is_nothing_to_miss(asked: Callable[..., pytest.RunResult]) -> None:
    result = asked("silent", "--faults", "--case", CASE, "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*takes no case of mode=tp or issues no collective there"])


def test_ranks_that_part_undisturbed_fail(asked: Callable[..., pytest.RunResult]) -> None:
    result = asked("parted", "--faults", "--case", CASE)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["the subject does not finish undisturbed:", "*rank 1*"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--device", "cuda"), "*device=cuda: faults are applied on the CPU; legal: *"),
        (("--case", "tp=5 heads=4"), "*case 'tp=5 heads=4': *"),
    ],
)
def test_a_wrong_request_is_one_sentence(
    asked: Callable[..., pytest.RunResult], words: tuple[str, ...], message: str
) -> None:
    result = asked("needed", "--faults", *words)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([message])
    result.stdout.no_fnmatch_line("*Error*")


def test_processes_have_no_faults(asked: Callable[..., pytest.RunResult]) -> None:
    asked("needed", "--faults", "--engine", "pool").assert_outcomes(skipped=1)
