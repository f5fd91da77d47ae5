"""Known defects of unmodified Megatron-Core: every command of docs/megatron.md fails and names its module."""

import importlib.metadata
from pathlib import Path

import pytest

from bench.cells import cells
from reports.commands import cli

ROWS = [(cell.subject, cell.case, cell.needle) for cell in cells() if cell.feature == "as in megatron.md"]
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]


def test_the_page_has_every_known_defect() -> None:
    assert len(ROWS) == 10
    assert {subject for subject, _, _ in ROWS} == {"mcore_experts", "mcore_latent", "mcore_heads"}


@pytest.mark.slow
@pytest.mark.deep("30 CPU seconds each: what is wrong is looked at on several ranks, in several dtypes")
@pytest.mark.parametrize(("subject", "case", "module"), ROWS)
def test_a_known_defect_is_found_in_its_module_by_one_command(
    subject: str,
    case: str,
    module: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("megatron.core", reason="needs the extra `peers`")
    if not (found := importlib.metadata.version("megatron-core")).startswith("0.16."):
        pytest.skip(f"megatron-core {found}: the page is about 0.16")
    monkeypatch.chdir(tmp_path)
    command = ["run", case, "--subject", f"suites.subjects.{subject}:subject", "--when", "0"]
    assert cli.main(command) == 1
    out = capsys.readouterr().out
    what, first = (next(line for line in out.splitlines() if line.startswith(word)) for word in ("what:", "first:"))
    assert module in what or module in first, out
