"""Run folders of other releases: one of layout 1 is read whole, a later one is refused in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.run_folder import SCHEMA
from reports.stored.files import RunFolderError
from reports.stored.frames import load
from tests.harness.command_line import CommandLine
from tests.reports import sample_run


def with_schema(folder: Path, schema: object) -> Path:
    """The run written by hand, whose layout has this number."""
    sample_run.write(folder, failing=True)
    env = json.loads((folder / "env.json").read_text()) | {"schema": schema}
    (folder / "env.json").write_text(json.dumps(env))
    return folder


def test_a_run_of_the_former_layout_is_read_as_a_whole(shardproof: CommandLine, tmp_path: Path) -> None:
    """Folders had no number, verdicts were not counted and decided nothing, and there was no table of errors."""
    former = str(sample_run.write(tmp_path / "former", failing=True))
    (tmp_path / "former" / "errors.csv").unlink()
    run = load(former)
    assert run.notes == () and "schema" not in run.env and set(run.verdicts["decided"]) == {""}
    status, out, _ = shardproof("show", former)
    assert status == 0 and sample_run.MESSAGE in out
    assert shardproof("page", former, "-o", "page.html")[0] == 0
    assert shardproof("trace", former, "-o", "trace.json")[0] == 0
    assert shardproof("compare", former, former)[0] == 0


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
