"""Names to objects: what can be named, and one clear message for each way to get it wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness import ledger
from harness.errors import RequestError
from harness.resolve import resolve


def test_objects_and_their_attributes_are_found() -> None:
    assert resolve("harness.ledger:OPS") is ledger.OPS
    assert resolve("reference.case:Case.parse")("mode=tp").mode == "tp"  # type: ignore[operator]


@pytest.mark.parametrize("name", ["", "harness", "harness.ledger:", ":OPS", "a b:c", "./file.py:x", "a:b:c", "..:x"])
def test_a_malformed_name_is_refused(name: str) -> None:
    with pytest.raises(
        RequestError, match=r"must be written module:object; legal: parallel\.subject:subject"
    ) as caught:
        resolve(name)
    assert caught.value.exit_status == 2 and repr(name) in str(caught.value)


def test_a_missing_module_is_named() -> None:
    with pytest.raises(RequestError, match="there is no module 'no_such_package'"):
        resolve("no_such_package.inner:x")
    with pytest.raises(RequestError, match=r"there is no module 'harness\.nothing'"):
        resolve("harness.nothing:x")


def test_a_missing_object_brings_the_nearest_name() -> None:
    with pytest.raises(RequestError, match=r"harness\.ledger has no 'COLUMN'; legal: harness\.ledger:COLUMNS"):
        resolve("harness.ledger:COLUMN")


def test_the_name_offered_is_the_modules_own_and_not_one_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_importing_subject.py").write_text("import torch\nfrom pathlib import Path\ndef train(): ...\n")
    (tmp_path / "my_empty_subject.py").write_text("")
    with pytest.raises(RequestError, match="has no 'torc'; legal: my_importing_subject:train"):
        resolve("my_importing_subject:torc")
    with pytest.raises(RequestError, match="has no 'subject'; it defines nothing; legal: subject"):
        resolve("my_empty_subject:subject")


def test_a_file_in_the_working_directory_is_found_and_its_errors_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (tmp_path / "my_own_subject.py").write_text("subject = 7\n")
    (tmp_path / "my_broken_subject.py").write_text("import no_such_thing\n")
    (tmp_path / "my_raising_subject.py").write_text("1 / 0\n")
    assert resolve("my_own_subject:subject") == 7
    with pytest.raises(RequestError, match="my_broken_subject fails on import: No module named 'no_such_thing'"):
        resolve("my_broken_subject:subject")
    with pytest.raises(RequestError, match="my_raising_subject fails on import: ZeroDivisionError: division by zero"):
        resolve("my_raising_subject:subject")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("sys.exit(0)", "SystemExit: 0$"),
        ("sys.exit()", "SystemExit$"),
        ("raise BaseException('x')", "BaseException: x"),
    ],
)
def test_a_module_that_leaves_on_import_is_told_and_does_not_end_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, told: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_leaving_subject", raising=False)
    (tmp_path / "my_leaving_subject.py").write_text(f"import sys\n{line}\n")
    with pytest.raises(RequestError, match=f"my_leaving_subject fails on import: {told}"):
        resolve("my_leaving_subject:subject")


def test_ctrl_c_while_a_module_is_imported_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_interrupted_subject.py").write_text("raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        resolve("my_interrupted_subject:subject")
