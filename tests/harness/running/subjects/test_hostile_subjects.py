"""A subject's own code may do anything: its case gets a verdict in words and the cases after it run.

Names to objects, and the modes of a subject: one clear message for each way to get them wrong.
"""

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardproof.harness import ledger
from shardproof.harness.errors import RequestError, error_text
from shardproof.harness.resolve import resolve
from shardproof.harness.running.ranks.execution import RankTask, perform
from shardproof.harness.running.result import CaseResult
from shardproof.harness.subject import NamedSubject, Unanswered, answer_question, claims, resolve_subject
from shardproof.reference.case import Case
from shardproof.reference.language.core import MODES
from shardproof.reference.training import truth as dense
from tests.harness.proofs import proved, ran
from tests.harness.toy_subjects import Stating, right

CASE = Case.parse("layers=1 hidden=16 heads=2 ffn=16 seq=8 micro=1 steps=1")
BOTH = CASE, CASE.but(seed=1)
HERE = __name__


class Silent(BaseException):
    """An exception that does not even say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


def leaving(case: Case, device: torch.device) -> dict[str, Tensor]:
    """Rank 1 leaves as if all were well, and rank 0 waits for it."""
    if dist.is_initialized() and dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    sys.exit(0)


def silent(case: Case, device: torch.device) -> dict[str, Tensor]:
    """Raises what cannot be printed, for one seed."""
    if case.seed:
        return dense.subject(case, device)
    raise Silent


class Speaking(Stating):
    """Right, behind a module that can be captured."""

    def __call__(self, case: Case, device: torch.device) -> dict[str, Tensor]:
        torch.nn.Sequential(torch.nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()
        return super().__call__(case, device)


class Closed(Speaking):
    """The same, and raises when one of these of its statements is read."""

    def __init__(self, *unread: str) -> None:
        super().__init__(unread=unread)

    def __getattr__(self, name: str) -> object:
        raise (RuntimeError if name in vars(self)["unread"] else AttributeError)(f"no {name} here")


def raising(*_: object) -> str:
    """Fails for seed 0, in any state."""
    raise RuntimeError("broke")


def leaves(*_: object) -> object:
    sys.exit(0)


number_for_modes = Speaking(modes=7)
broken_pipeline = Speaking(pipeline=raising)
broken_refusal = Speaking(refuses=lambda case: "" if case.seed else raising())


def told(subject: Callable[..., Any]) -> CaseResult:
    return proved(subject, CASE, timeout_s=20)


def what(result: CaseResult) -> str:
    (verdict,) = result.verdicts
    assert (verdict.check, verdict.verdict) == ("run", "fail")
    return verdict.message.splitlines()[0].removeprefix("what:   the subject did not finish: ")


def test_sys_exit_without_an_outcome_is_a_failure_that_names_it() -> None:
    line = what(told(leaving))
    at = "returned nothing, at tests/harness/running/subjects/"
    assert line.startswith(f"rank 1 of 2 raised SystemExit: left with status 0 (sys.exit) and {at}")
    assert line.endswith(" in leaving (check run)")


def test_sys_exit_on_a_rank_in_another_process_is_raised_with_words() -> None:
    for task in (RankTask(case=CASE, subject=leaving, device="cpu", record=record) for record in (False, True)):
        with pytest.raises(SystemExit, match=r"^left with status 0 \(sys\.exit\) and returned nothing$"):
            perform(1, task)


def test_an_exception_without_words_ends_one_case_and_not_the_run(tmp_path: Path) -> None:
    result = ran(tmp_path, f"{HERE}:silent", *BOTH)
    first, *others = result.verdicts
    assert "raised Silent: (what it says cannot be read: its __str__ raised RuntimeError)" in first.message
    assert result.exit_status == 1 and {verdict.case for verdict in others} == {f"{CASE} seed=1"}


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("one"), "ValueError: one"),
        (ValueError("\none\ntwo"), "ValueError: one ..."),
        (ValueError("2 of 3 are wrong:\n  w1: too wide\n  w2"), "ValueError: 2 of 3 are wrong: w1: too wide ..."),
        (ValueError(), "ValueError"),
        (ValueError("half \ud800"), r"ValueError: half \ud800"),
    ],
)
def test_lines_that_are_left_out_of_an_exception_are_marked(error: Exception, text: str) -> None:
    assert error_text(error) == text


def test_a_refusal_that_raises_is_unknown_and_modes_that_are_no_words_are_refused(tmp_path: Path) -> None:
    """The next case runs after the first; of the second nothing is stored."""
    with pytest.raises(RequestError, match=r": modes=7 must be a tuple of words; legal: modes = \('tp',\)$"):
        ran(tmp_path, f"{HERE}:number_for_modes", *BOTH)
    assert not list(tmp_path.iterdir())
    result = ran(tmp_path, f"{HERE}:broken_refusal", *BOTH)
    first, *others = result.verdicts
    assert (first.check, first.verdict) == ("supported", "unknown")
    assert first.message.startswith("subject.refuses failed: RuntimeError: broke, at tests/")
    assert result.exit_status == 1 and any(verdict.check == "forward" for verdict in others)


def test_a_pipeline_that_raises_leaves_the_run_without_its_bubble(tmp_path: Path) -> None:
    case = "mode=tp tp=1 pp=2 layers=2 hidden=16 heads=2 vocab=24 seq=4 micro=1 steps=1"
    result = ran(tmp_path, f"{HERE}:broken_pipeline", case, engine="dry")
    assert result.verdicts and "bubble" not in (result.path / "cases.jsonl").read_text()


@pytest.mark.parametrize(
    ("expected", "activations", "why"),
    [
        (lambda case: [1, 2], raising, "TypeError: int has no phase of type str, so it is no term; a term has phase, "),
        (leaves, leaves, "SystemExit: 0"),
        (7, 7, "TypeError: 'int' object is not callable"),
    ],
)
def test_a_closed_form_that_is_none_and_activations_that_fail_are_unknown(
    expected: object, activations: object, why: str
) -> None:
    result = told(Speaking(expected=expected, activations=activations))
    unknown = {verdict.check: verdict.message for verdict in result.verdicts if verdict.verdict == "unknown"}
    assert unknown["expectation"].startswith(f"subject.expected failed: {why}") and result.expectation is None
    assert unknown["activations"].startswith("subject.activations failed: ")


def test_an_interruption_by_the_user_is_no_answer() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        answer_question("expected", interrupted)
    with pytest.raises(Unanswered, match=r"^subject\.harmless failed: Silent: \(what it says cannot be read"):
        answer_question("harmless", lambda: silent(CASE, torch.device("cpu")))


def test_attributes_that_raise_when_they_are_read_are_told_where_they_are_asked() -> None:
    for name in ("modes", "refuses", "per_rank"):
        (verdict,) = told(Closed(name)).verdicts
        assert verdict.verdict == "unknown"
        assert verdict.message.startswith(f"subject.{name} failed: RuntimeError: no {name} here, at tests/")
    told_later = {"expectation": "expected", "activations": "activations", "coverage": "unchecked"}
    unread = told(Closed(*told_later.values(), "axes", "harmless"))
    messages = {verdict.check: verdict.message for verdict in unread.verdicts if verdict.verdict == "unknown"}
    for check, name in told_later.items():
        assert messages[check].startswith(f"subject.{name} failed: RuntimeError: no {name} here, at tests/")


def test_objects_and_their_attributes_are_found() -> None:
    assert resolve("shardproof.harness.ledger:OPS") is ledger.OPS
    assert resolve("shardproof.reference.case:Case.parse")("mode=tp").mode == "tp"  # type: ignore[operator]


MALFORMED = r"must be written module:object; legal: shardproof\.parallel\.subject:subject"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((name, MALFORMED) for name in ("", "shardproof.harness.ledger:", ":OPS", "./file:x", "a:b:c")),
        ("no_such_package.inner:x", "there is no module 'no_such_package' in"),
        ("harness.nothing:x", r"there is no module 'harness\.nothing' in"),
        (
            "shardproof.harness.ledger:COLUMN",
            r"shardproof\.harness\.ledger has no 'COLUMN'; legal: shardproof\.harness\.ledger:COLUMNS",
        ),
    ],
)
def test_a_name_that_leads_nowhere_is_refused_and_of_objects_the_nearest_is_told(name: str, message: str) -> None:
    with pytest.raises(RequestError, match=f"^name {re.escape(repr(name))}: {message}") as caught:
        resolve(name)
    assert caught.value.exit_status == 2


def test_name_offered_is_modules_own_and_not_one_it_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_importing_subject.py").write_text("import torch\nfrom pathlib import Path\ndef train(): ...\n")
    with pytest.raises(RequestError, match="has no 'torc'; legal: my_importing_subject:train"):
        resolve("my_importing_subject:torc")


def test_a_file_in_the_working_directory_is_found_and_an_interruption_stays_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (tmp_path / "my_own_subject.py").write_text("subject = 7\n")
    (tmp_path / "my_interrupted_subject.py").write_text("raise KeyboardInterrupt\n")
    assert resolve("my_own_subject:subject") == 7
    with pytest.raises(KeyboardInterrupt):  # Ctrl-C while a module is imported stays one
        resolve("my_interrupted_subject:subject")


CLAIMING = NamedSubject(name="my:subject", call=Stating(modes=("tp", "ep", "tp")))
LEGAL = "legal: tp|tp-sp|mtp|msp|fsp|isp|autotp"


def test_a_subject_that_claims_nothing_is_asked_everything() -> None:
    assert (
        claims(resolve_subject(right)).modes
        == claims(resolve_subject("shardproof.parallel.subject:subject")).modes
        == tuple(MODES)
    )


def test_a_mode_that_no_case_can_have_is_left_out_and_known_and_one_that_is_not_claimed_cannot_be_chosen() -> None:
    found = claims(CLAIMING)
    assert (found.choose_modes("all"), found.choose_modes("tp,tp"), found.unknown) == (("tp",), ("tp",), ("ep",))
    with pytest.raises(RequestError) as caught:
        found.choose_modes("isp")
    assert str(caught.value) == "modes=isp: my:subject claims tp, ep; legal: --modes all"


@pytest.mark.parametrize(
    ("modes", "message"),
    [
        (("ep", "cp"), f"modes=('ep', 'cp') names no mode that a case can have; {LEGAL}"),
        ((), f"modes=() names no mode that a case can have; {LEGAL}"),
        ("tp", "modes='tp' must be a tuple of words; legal: modes = ('tp',)"),
        (("tp", 7), "modes=('tp', 7) must be a tuple of words; legal: modes = ('tp',)"),
    ],
)
def test_other_claims_are_refused(modes: object, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        claims(replace(CLAIMING, call=Stating(modes=modes)))
    assert str(caught.value) == f"subject=my:subject: {message}"
