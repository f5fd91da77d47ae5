"""Sentences for mistakes of a first hour: a file in place of a name, a missing package, an exception behind another."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from shardproof.harness.engines.threads.dry import DryEngine
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.errors import RequestError
from shardproof.harness.resolve import resolve
from shardproof.reference.case import Case
from tests.harness.proofs import proved

CASE = Case.parse("layers=1 hidden=16 heads=2 ffn=16 seq=8 micro=1 steps=1")
FILES = {"train_tp.py": "TIMES = 3\ndef build(config): ...\ndef step(case, device): ...\nraise SystemExit\n"}
A_FILE = "is a file, and a name is written module:object"
FILES |= {"empty.py": "", "wide/net.py": "def subject(case, device): ...\ndef other(case, device): ...\n"}
FILES |= {"needs.py": "import no_such_package.inner\n", "broken.py": "def ("}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("train_tp.py", "is a file, and a name is written module:object; legal: train_tp:step; it defines step, build"),
        (
            "./train_tp.py",
            "is a file, and a name is written module:object; legal: train_tp:step; it defines step, build",
        ),
        ("train_tp.py:build", f"{A_FILE}; legal: train_tp:build"),
        ("wide/net.py", "is a file, .*; legal: wide.net:subject; it defines subject, other"),
        ("train_tp", "must be written module:object; legal: train_tp:step"),
        ("empty.py", "is a file, .*; legal: empty:subject; it defines nothing; "),
        ("broken.py", "is a file, .*; legal: broken:subject; it defines nothing; "),
        (
            "absent.py",
            "must be written module:object, and there is no such file; legal: shardproof.parallel.subject:subject",
        ),
        ("2d.py", "must be written module:object, and there is no such file"),
        ("2d:run", "'2d' begins with a digit, which .*; legal: rename it to subject_2d and write subject_2d:run"),
        ("my-net:run", "'my-net' has a hyphen, which .*; legal: rename it to my_net and write my_net:run"),
        ("needs:run", "needs fails on import: .*; the package no_such_package is not installed here; legal: pip"),
    ],
)
def test_what_to_type_in_place_of_a_file_is_said_without_running_it(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wide").mkdir()
    for file, text in FILES.items():
        (tmp_path / file).write_text(text)
    with pytest.raises(RequestError, match=f"^name {re.escape(repr(name))}: {message}"):
        resolve(name)
    with pytest.raises(RequestError, match=r"in the folder of the file \(.*\); legal: train_tp:step"):
        resolve(str(tmp_path / "train_tp.py"))


def chained(case: object, device: object) -> object:
    """An exception on one rank, raised from another."""
    try:
        raise ValueError("4 entries for 2 parameters")
    except ValueError as inner:
        raise RuntimeError("stage 0 failed") from inner


def unpacked(case: object, device: object) -> object:
    """Its package is missing."""
    return importlib.import_module("no_such_package")


@pytest.mark.parametrize("engine", [InprocEngine, DryEngine])
def test_what_stands_behind_an_exception_of_a_rank_is_said(engine: type[Any]) -> None:
    with engine() as made:
        told = [proved(subject, CASE.but(tp=2), made).verdicts[0].message for subject in (chained, unpacked)]
    place = r"tests/\S+:\d+ in chained"
    assert re.search(
        f"RuntimeError: stage 0 failed, at {place}; its cause is ValueError: 4 entries .*, at {place} ", told[0]
    )
    assert "; the package no_such_package is not installed here; legal: pip install the package that has it" in told[1]
