"""Untrue statements of a line `when:` are left out: each is read and run again."""

from collections.abc import Callable
from typing import Any

from shardproof.harness.diagnosing.tried_words import OutOfTime, Proved, confirm_words
from shardproof.harness.diagnosing.words_text import Needed, NeededWords, Right
from shardproof.harness.plain_case import Vocabulary
from shardproof.harness.verdicts.words import when_line

VOCABULARY = Vocabulary.of({"act": ("relu", "tanh"), "bias": (False, True)})


def found(text: str, *needed: Needed) -> NeededWords:
    return NeededWords(case=VOCABULARY.parse(text), needed=needed, left=True)


def word(name: str, *fails: Any, right: Any, further: tuple[Any, ...] = ()) -> Needed:
    return Needed(word=name, fails=fails, right=(Right(value=right, further=further),))


def tried(words: NeededWords, failed: str, proves: Callable[[Any], Proved]) -> tuple[str, list[str]]:
    """The line that is left, and the cases that were run."""
    runs: list[str] = []

    def counted(case: Any) -> Proved:
        runs.append(str(case))
        return proves(case)

    return when_line(confirm_words(words, VOCABULARY.parse(failed), VOCABULARY.parse, counted).when), runs


BOTH = found("tp=2 act=tanh", word("tp", 2, 4, right=1), word("act", "tanh", right="relu"))


def test_each_statement_is_run_once_as_it_is_printed() -> None:
    line, runs = tried(BOTH, "tp=4 act=tanh", lambda case: (case.tp > 1 and case.act == "tanh", ()))
    assert line == "fails with tp=2|4 and act=tanh; passes with tp=1, with act=relu (tried on 'tp=2 act=tanh')"
    assert runs == ["tp=2 act=tanh", "act=tanh", "tp=2", "tp=4 act=tanh"]


def test_what_is_not_so_again_is_left_out() -> None:
    line, _ = tried(BOTH, "tp=2 act=tanh", lambda case: (case.tp == 2 and case.act == "tanh", ()))
    assert line.startswith("fails with tp=2 and act=tanh; passes with tp=1, with act=relu"), "tp=4 does not fail again"
    line, _ = tried(BOTH, "tp=4 act=tanh", lambda case: (case.tp == 2 and case.act == "tanh", ()))
    assert line.startswith("fails with act=tanh, perhaps tp=2; passes with act=relu"), "the failing case has tp=4"
    line, _ = tried(BOTH, "tp=2 act=tanh", lambda case: (case.act == "tanh", ()))
    assert line.startswith("fails with act=tanh, perhaps tp=2; passes with act=relu"), "tp=1 fails again"
    line, _ = tried(BOTH, "tp=2 act=tanh", lambda case: (True if case.act == "tanh" else None, ()))
    assert line == "fails even in the simplest case tried: 'tp=2 act=tanh'; perhaps needed: tp=2, act=tanh"
    line, _ = tried(BOTH, "tp=2 act=tanh", lambda case: (False, ()))
    assert line.startswith("nothing that is so again: the plainest case did not fail")


def test_checks_that_fail_for_another_reason_are_named() -> None:
    line, _ = tried(BOTH, "tp=4 act=tanh", lambda case: (case.tp > 1 and case.act == "tanh", ("ledger", "replicas")))
    assert "passes with tp=1 but for ledger|replicas, with act=relu but for ledger|replicas (tried" in line


def test_words_that_change_with_one_are_named_where_a_reader_needs_them() -> None:
    """Values that follow by themselves are not printed."""
    bias = (("bias", True),)
    fails: Callable[[Any], Proved] = lambda case: (case.tp == 2 and not case.bias, ())  # noqa: E731
    line, runs = tried(found("tp=2", word("act", "relu", right="tanh", further=bias)), "tp=2", fails)
    assert line == "fails with act=relu; passes with act=tanh bias=true (tried on 'tp=2')"
    assert runs == ["tp=2", "tp=2 act=tanh bias=true"]
    line, _ = tried(
        found("tp=2 bias=true", word("tp", 2, right=1, further=bias)), "tp=2", lambda case: (case.tp == 2, ())
    )
    assert line == "fails with tp=2; passes with tp=1 (tried on 'tp=2 bias=true')"


def test_a_value_that_a_reader_cannot_have_is_left_out() -> None:
    line, _ = tried(found("tp=2", word("act", "relu", right="none")), "tp=2", lambda case: (True, ()))
    assert line == "fails even in the simplest case tried: 'tp=2'; perhaps needed: act=relu"


def test_what_time_did_not_allow_is_named() -> None:
    left = iter([(True, ()), (False, ())])

    def proves(case: Any) -> Proved:
        try:
            return next(left)
        except StopIteration:
            raise OutOfTime from None

    line, _ = tried(BOTH, "tp=2 act=tanh", proves)
    assert line == "fails with tp=2; passes with tp=1 (tried on 'tp=2 act=tanh'; no time was left to try act)"
    line, _ = tried(BOTH, "tp=2 act=tanh", proves)
    assert line.startswith("not known: no time was left to run what was found again")
