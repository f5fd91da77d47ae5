"""Pages: narrow lines, a purpose first, links that lead somewhere; the README's story and docs/verify.md are true.

Pages import `shardproof` alone, and docs/names.md has all of its names.

Blocks of docs/verify.md are taken as they stand, in an empty folder: files are written, commands run in their order,
outputs compared. The table of the default run: test_default_run.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import shardproof
from shardproof.reports.commands.cli import main
from tests import ROOT

pytest_plugins = ("pytester",)
WIDEST, WIDEST_ROW = 120, 200
"""Characters of a line, and of one with a link or of a row."""
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
INDEX = DOCS / "README.md"
README = (ROOT / "README.md").read_text()
LONGEST_README, ALL_PAGES = 90, 3000
"""Lines: what needs more room is a page in docs/; and those of all pages that people write."""
GENERATED = {"case.md", "catalogue.md", "default_run.md", "systems.md"}
"""Pages that a command writes."""


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure is not tried on processes before its line `when:`: they take ten CPU seconds, and change no word."""
    monkeypatch.setattr("shardproof.harness.running.experiments._passes_on_processes", lambda *_: False)


def wide_lines(text: str) -> list[str]:
    lines = text.splitlines()
    return [line for line in lines if len(line) > (WIDEST_ROW if "](" in line or line[:1] == "|" else WIDEST)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_is_narrow_and_names_its_purpose(page: Path) -> None:
    text = page.read_text()
    assert wide_lines(text) == []
    purpose = text.split("\n\n")[1]
    assert text.startswith("# ") and purpose[:1].isalpha() or page == ROOT / "README.md"
    assert len(purpose.splitlines()) <= 3, "the first lines name what the page is for"


def test_the_index_has_every_page() -> None:
    assert "](docs/README.md)" in README
    linked = {(INDEX.parent / link).resolve() for link in re.findall(r"\]\(([^)#:]+)\)", INDEX.read_text())}
    assert {path for path in INDEX.parent.iterdir() if path.suffix in (".md", ".ipynb")} - {INDEX} <= linked


ABOUT_THE_FOLDERS = {"design.md", "gain.py"}
MODULE = re.compile(r"(?<![/\w.])(?:shardproof\.)?(?:bugs|harness|parallel|reference)\.(?!py\b)\w+[\w.]*(?::\w+)?")
A_SUBJECT = {"shardproof.parallel.subject:subject"}


def inner_names(text: str) -> set[str]:
    return set(MODULE.findall(text)) - A_SUBJECT


def test_a_page_names_no_module_behind_the_public_face() -> None:
    paths = [ROOT / "README.md", *(path for path in DOCS.rglob("*") if path.suffix in (".md", ".ipynb", ".py", ".yml"))]
    for path in paths:
        assert path.name in ABOUT_THE_FOLDERS or not inner_names(path.read_text()), path
    assert inner_names("see `shardproof.harness.outcome` and `shardproof.bugs.anchors`") == {
        "shardproof.harness.outcome",
        "shardproof.bugs.anchors",
    }
    paths_and_names = "`parallel/communication/expectation.py`, reports.py, shardproof.load"
    assert not inner_names(f"--subject shardproof.parallel.subject:subject, {paths_and_names}")


def test_the_page_of_names_has_them_all() -> None:
    rows = [line for line in (DOCS / "names.md").read_text().splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+)(?:\([^`]*\))?`", row.split(" | ")[0])]
    assert sorted(named) == shardproof.__all__


TABLE = (DOCS / "default_run.md").read_text()
ERROR = slice(-5, -1)
"""Where a row's words hold its error and the dtype of that case: rounding, which differs between processors."""


def table_rows(text: str) -> list[list[str]]:
    """The words of every row of the headline table, its error left out."""
    rows = [line.split() for line in text.splitlines() if line.endswith(" pass") and " / " in line]
    return [[*row[: ERROR.start], *row[ERROR.stop :]] for row in rows]


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= LONGEST_README


def test_pages_that_people_write_are_short_in_all_and_others_say_that_they_are_generated() -> None:
    written = [page for page in (*PAGES, ROOT / "CHANGELOG.md") if page.name not in GENERATED]
    assert sum(len(page.read_text().splitlines()) for page in written) <= ALL_PAGES
    below = INDEX.read_text().partition("## Generated\n")[2].partition("\n## ")[0]
    assert {page.name for page in PAGES if "This page is generated" in page.read_text()} == GENERATED
    assert set(re.findall(r"\]\((\w+\.md)\)", below)) == GENERATED


def test_the_numbers_of_the_readme_are_those_of_the_pages_behind_them() -> None:
    findings, systems = (ROOT / "FINDINGS.md").read_text(), (DOCS / "systems.md").read_text()
    defects = len(titles := re.findall(r"^## [^:\n]+: (.+)$", findings, re.M))
    assert re.findall(r"^\| \d+ \| [^|]+ \| \[(.+)\]\(#[^)]+\) \| [^|]+ \|$", findings, re.M) == titles
    assert f"[{defects} defects](FINDINGS.md)" in README
    cells = re.findall(r"^\| [^|]+ \| [^|]+ \| (\d+) \| (\d+) \| (\d+) \| \d+ \|$", systems, re.M)
    passed, wrong, cannot = (sum(map(int, column)) for column in zip(*cells, strict=True))
    assert f"[{passed} cases pass, {wrong} fail](docs/systems.md)" in README and f", and {cannot} need a GPU" in README


@pytest.mark.usefixtures("no_processes")
def test_the_story_runs_and_its_bug_is_found_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = [re.findall(rf"^```{kind}\n(.*?)^```$", README, re.M | re.S) for kind in ("python mlp.py", "text")]
    code, printed = (found[0] for found in blocks)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("mlp.py").write_text(code)
    assert main(["run", "--subject", "mlp:subject"]) == 1
    told = capsys.readouterr().out
    assert [line for line in printed.splitlines() if line not in told] == []
    assert re.search(r"^tp +2 +1 / 0 ", told, re.M), "its all-reduce is one of forward"
    right = code.replace("    loss.backward()", "    loss.backward()\n    dist.all_reduce(model.proj.weight.grad)")
    Path("right.py").write_text(right)
    assert main(["run", "--subject", "right:subject"]) == 0, "with the line that is missing it passes"


def test_wrong_gradients_have_the_losses_that_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "loss_curves.md").read_text()
    code, printed = (re.findall(rf"^```{kind}\n(.*?)^```$", page, re.M | re.S)[0] for kind in ("python", "text"))
    exec(code, {})  # noqa: S102  (a page of this project)
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md", ROOT / "FINDINGS.md"], ids=lambda page: page.stem)
def test_every_link_to_a_file_leads_to_one(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]*)(#[^)]*)?\)", page.read_text())
    assert [link for link, _ in links if not (page.parent / link).exists()] == []
    for link, anchor in links:
        if anchor:
            headings = re.findall(r"^#+ (.+)$", (page.parent / link if link else page).read_text(), re.MULTILINE)
            assert anchor[1:] in {anchored(heading) for heading in headings}, f"{link}{anchor}"


def anchored(heading: str) -> str:
    """The anchor that a heading gets: letters and digits in lower case, spaces as hyphens."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


VERIFY = (DOCS / "verify.md").read_text()
FEW = "--hypothesis-profile=one-case -p no:cacheprovider -k 'stored or losses'"
"""An example of a few properties: pages and recipes are tested here."""
ROUNDING = re.compile(r"\S+ / [\d.]+e-\d+")
"""An error that rounding leaves, and what is allowed, of which control runs measure a part: processors differ."""


def run(line: str, patience_s: int, pytester: pytest.Pytester, capsys: pytest.CaptureFixture[str]) -> str:
    """Output of a command line, after its exit status was compared with the one in its comment (0)."""
    command, _, status = line.partition("  # exit status ")
    program, *words = shlex.split(command)
    capsys.readouterr()
    if program == "shardproof":
        patience = ["--when", str(patience_s)] if words[0] == "run" else []
        found, printed = main([*words, *patience]), capsys.readouterr().out
    elif program == "pytest":
        session = pytester.runpytest_inprocess(*shlex.split(FEW), *words)
        found, printed = int(session.ret), session.stdout.str()
    else:
        done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False, timeout=300)
        found, printed = done.returncode, done.stdout + done.stderr
    assert found == int(status or 0), f"{line}\n{printed}"
    return printed


@pytest.mark.usefixtures("loaded", "no_processes")
def test_every_block_of_docs_verify_runs_and_prints_what_it_says(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytester.syspathinsert()
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    blocks = re.findall(r"^```(\w+) ?(\S*)\n(.*?)^```$", VERIFY, re.MULTILINE | re.DOTALL)
    assert {kind for kind, _, _ in blocks} == {"python", "sh", "text"}
    first = next(text for kind, _, text in blocks if kind == "python")
    assert first.count("\n") <= 40, "an afternoon and about 40 lines"
    told = ""
    for (kind, name, text), (_, _, printed_then) in zip(blocks, [*blocks[1:], ("", "", "")], strict=True):
        if kind == "python":  # goes to the file of this name
            with Path(name).open("a") as file:
                file.write(("\n\n" if file.tell() else "") + text)
            sys.modules.pop(Path(name).stem, None)
        elif kind == "sh":
            patience_s = 100 if "when: " in printed_then else 0  # experiments end late on a loaded machine
            told = "\n".join(run(line, patience_s, pytester, capsys) for line in text.splitlines())
        else:
            printed = {ROUNDING.sub("#", line) for line in told.splitlines()}
            lines = [ROUNDING.sub("#", line) for line in text.splitlines()]
            assert [line for line in lines if not any(one.startswith(line) for one in printed)] == [], told
