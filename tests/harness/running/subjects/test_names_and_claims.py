"""Names to objects, and the modes of a subject: what can be named, one clear message for each way to get it wrong."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness import ledger
from harness.errors import RequestError
from harness.resolve import resolve
from harness.subject import NamedSubject, claims, named
from reference.language.modes import MODES
from tests.harness.toy_subjects import Stating, right


def test_objects_and_their_attributes_are_found() -> None:
    assert resolve("harness.ledger:OPS") is ledger.OPS
    assert resolve("reference.case:Case.parse")("mode=tp").mode == "tp"  # type: ignore[operator]


MALFORMED = r"must be written module:object; legal: parallel\.subject:subject"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((name, MALFORMED) for name in ("", "harness.ledger:", ":OPS", "./file.py:x", "a:b:c")),
        ("no_such_package.inner:x", "there is no module 'no_such_package' in"),
        ("harness.nothing:x", r"there is no module 'harness\.nothing' in"),
        ("harness.ledger:COLUMN", r"harness\.ledger has no 'COLUMN'; legal: harness\.ledger:COLUMNS"),
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
    assert claims(named(right)).modes == claims(named("parallel.subject:subject")).modes == tuple(MODES)


def test_a_mode_that_no_case_can_have_is_left_out_and_known_and_one_that_is_not_claimed_cannot_be_chosen() -> None:
    found = claims(CLAIMING)
    assert (found.chosen("all"), found.chosen("tp,tp"), found.unknown) == (("tp",), ("tp",), ("ep",))
    with pytest.raises(RequestError) as caught:
        found.chosen("isp")
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
