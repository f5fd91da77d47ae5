"""Run folders of other releases: a stored one of layout 1 is read whole, a later one is refused in one sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from harness.run_folder import SCHEMA
from reports.stored.files import RunFolderError
from reports.stored.frames import load
from tests.harness.command_line import CommandLine

FORMER = Path(__file__).parent / "run_of_schema_1"
"""Written before folders had a number, by `shardproof run` with a case of mode=tp and a variant of mode=isp."""


def with_schema(folder: Path, schema: object) -> Path:
    """A copy of the stored run whose layout has this number."""
    shutil.copytree(FORMER, folder)
    env = json.loads((folder / "env.json").read_text()) | {"schema": schema}
    (folder / "env.json").write_text(json.dumps(env))
    return folder


def test_a_run_of_the_former_layout_is_read_as_a_whole(shardproof: CommandLine) -> None:
    run = load(FORMER)
    assert run.notes == () and "schema" not in run.env
    assert list(run.cases["mode"]) == ["tp", "isp"] and len(run.ledger) == 128
    assert list(run.verdicts[run.verdicts["verdict"] == "fail"]["mode"].unique()) == ["isp"]
    status, out, _ = shardproof("show", str(FORMER))
    assert status == 0 and "all are 0.5 x the truth" in out
    assert shardproof("page", str(FORMER), "-o", "page.html")[0] == 0
    assert shardproof("trace", str(FORMER), "-o", "trace.json")[0] == 0
    assert shardproof("compare", str(FORMER), str(FORMER))[0] == 0


@pytest.mark.parametrize("command", ["show", "page", "trace", "compare"])
def test_a_run_of_a_later_layout_is_one_sentence(shardproof: CommandLine, tmp_path: Path, command: str) -> None:
    later = with_schema(tmp_path / "later", SCHEMA + 1)
    message = shardproof.refused(command, str(later))
    rule = f"is the layout of the folder, and this release reads 1 to {SCHEMA}"
    assert f"{later}/env.json: schema={SCHEMA + 1} {rule}; legal: upgrade shardproof" in message


@pytest.mark.parametrize("schema", ["2", 0, -1, 1.5, True, None, [2]])
def test_a_layout_that_is_no_number_is_one_sentence(tmp_path: Path, schema: object) -> None:
    with pytest.raises(RunFolderError, match="schema=.* must be a whole number above 0; legal: 2"):
        load(with_schema(tmp_path / "odd", schema))


@pytest.mark.parametrize("schema", range(1, SCHEMA + 1))
def test_every_layout_so_far_is_read(tmp_path: Path, schema: int) -> None:
    assert load(with_schema(tmp_path / "run", schema)).env["schema"] == schema
