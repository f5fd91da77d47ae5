"""A training script recorded as it is: same output and exit, a run folder that every report takes, kills and faults."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardproof.harness.witnesses.torch_trace import read_traces
from shardproof.reports.comparing.comparison import compare
from shardproof.reports.comparing.snapshot import snapshot
from shardproof.reports.pages import page
from shardproof.reports.programs import figures, program_frames, program_tables
from shardproof.reports.stored.frames import Run, load
from tests import ROOT
from tests.forked import Forked
from tests.harness.programs.launched import LIMIT_S, forked, free_port, ran, read_alike, seen_alike

SCRIPT = Path(__file__).with_name("training.py")
TOKENS = 7000
STATED = ["--tokens", str(TOKENS), "--case", "mode=tp tp=1 dp=2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("program")
    shutil.copy(SCRIPT, made / "training.py")
    return made


def trained(folder: Path, *words: str, record: Sequence[str] | None = None) -> list[Forked]:
    """The two ranks of three steps, which have ended well."""
    ranks = forked(folder, "training.py", "3", *words, record=record)
    assert [rank.ended(LIMIT_S) for rank in ranks] == [0, 0], ranks[0].err
    return ranks


@pytest.fixture(scope="module")
def recorded(folder: Path) -> tuple[Run, str]:
    ranks = trained(folder, record=["--steps", "0:3", "--profile", "torch", *STATED])
    return load(folder / "runs" / "latest"), ranks[0].out


def test_output_is_as_without_us(folder: Path, recorded: tuple[Run, str]) -> None:
    assert trained(folder)[0].out == recorded[1]


def test_every_rank_writes_its_part_with_phases_axes_modules_and_lines(recorded: tuple[Run, str]) -> None:
    run = recorded[0]
    assert run.notes == ()
    rows = run.ledger[(run.ledger["rank"] == 1) & (run.ledger["step"] == 1)]
    told = rows[["microbatch", "phase", "region", "op", "axis", "payload_bytes"]].astype("str").values.tolist()
    gradients = 4 * 2 * (5 * 5 + 5)
    assert told == [
        # DDP has seen one backward and orders its buckets anew: 5 int32 and 1 int32
        ["0", "forward", "", "broadcast", "world", "20"],
        ["0", "forward", "", "broadcast", "world", "4"],
        ["1", "backward", "0.linear", "all_reduce", "world", str(gradients)],
        ["1", "metric", "", "all_reduce", "world", "4"],
        ["1", "metric", "", "all_reduce", "tp", "4"],
    ]
    lines = SCRIPT.read_text().splitlines()
    called = [lines[int(caller.removeprefix("training.py:")) - 1].strip() for caller in rows["caller"]]
    called = [line.partition("(")[0] for line in called]
    assert called == ["model", "model", "loss.backward", "dist.all_reduce", "dist.all_reduce"]
    steps = figures.steps_by_rank(run)
    assert steps["step"].tolist() == [0, 1, 2, 0, 1, 2]
    assert set(steps["microbatches"]) == {2}
    assert steps["step_us"].notna().all()


def test_torchs_profiler_saw_the_same_calls_and_the_reports_take_the_folder(recorded: tuple[Run, str]) -> None:
    run = recorded[0]
    seen_alike(run, "torch", read_traces(run.path / "traces", 2))
    read_alike(run, 2)
    text = page.render_page(run)
    assert "Beside its case" in text
    assert "Recorded: training.py on 2 ranks" in text
    assert not compare(snapshot(run, "a"), snapshot(run, "b")).breaches
    told = figures.list_findings(run)
    assert any("issue the same calls" in line for line in told)
    assert not any("waited" in line for line in told)  # DDP waits in C++ for what it issues


def test_speed_bandwidth_and_the_case_beside_it_are_reported(recorded: tuple[Run, str]) -> None:
    run = recorded[0]
    assert run.env["stated"]["tokens"] == TOKENS
    took_s = program_frames.step_s(run)
    assert took_s == pytest.approx(figures.steps_by_rank(run).groupby("step")["step_us"].max().median() / 1e6)
    rows = dict(program_frames.tokens_per_second(run))
    assert float(rows["tokens a second"].replace(",", "")) == pytest.approx(TOKENS / took_s, abs=1)
    calls = program_frames.bandwidth_by_size(run)
    assert set(calls["op"]) == {"all_reduce"} and (calls["gb_s"] > 0).all()
    beside, why_not = program_frames.compare_with_case(run)
    assert why_not == ""
    (row,) = [row for row in beside.to_dict("records") if row["op"] == "all_reduce"]
    assert (row["group_size"], row["calls"]) == (2, 2.0)
    assert (row["payload_bytes"], row["predicted_calls"]) == (4 * 2 * (5 * 5 + 5) + 4, 2.0)


@pytest.fixture(scope="module")
def dropping(folder: Path) -> tuple[Run, list[str]]:
    """Two steps of a program that drops handles, and sends and receives messages; what its ranks wrote as errors."""
    ranks = trained(folder, "dropped", "messages", record=["--steps", "1:3"])
    return load((folder / "runs" / "latest").resolve()), [rank.err for rank in ranks]


def test_sends_and_receives_have_columns_if_any(dropping: tuple[Run, list[str]], recorded: tuple[Run, str]) -> None:
    """In two steps rank 0 sends four messages and receives two; a module's row has the rank of most."""
    by_rank = figures.by_rank(dropping[0])
    assert by_rank[["rank", "send", "recv"]].values.tolist() == [[0, 4, 2], [1, 2, 4]]
    outside = figures.by_module(dropping[0]).set_index("folded").loc[""]
    assert (outside["send"], outside["recv"]) == (4, 4)
    for run, columns in ((dropping[0], ["send", "recv"]), (recorded[0], [])):
        headers = {made.title: made.headers for made in program_tables.tables_of_program(run)}
        for title in ("Modules", "Ranks"):
            assert [header for header in headers[title] if header in ("send", "recv")] == columns
        assert page.render_page(run).count('<th scope="col" class="number">send</th>') == len(columns)  # of both tables


def test_a_handle_that_nothing_waits_for_is_found_with_its_line(dropping: tuple[Run, list[str]]) -> None:
    line = 1 + [place for place, text in enumerate(SCRIPT.read_text().splitlines()) if "async_op=True" in text][0]
    (found,) = [one for one in figures.list_findings(dropping[0]) if "waited" in one]
    call = f"2 asynchronous all_reduce over world at training.py:{line}"
    assert found == f"{call}: never waited for, its handle was dropped (ranks 0 1)"


def test_it_ends_with_what_it_counted_and_the_next_command(folder: Path, dropping: tuple[Run, list[str]]) -> None:
    # Step 1: DDP's order of buckets, its gradients, two metrics; step 2: gradients, metrics and a barrier. In both,
    # three calls whose handles may be dropped, and three messages. Before, three calls when DDP is made, and gradients,
    # metrics and none of these in step 0 of a program without them.
    size = (20 + 4) + 2 * (4 * 2 * (5 * 5 + 5) + 2 * 4 + 3 * 4 + 3 * 7 * 4)
    counted = f"rank 0 of 2 recorded 2 steps and 21 calls, which handed over {size} bytes; next: shardproof show runs/"
    ended = "no call was recorded: the program ended in step 2, after 15 calls, and --steps 5:9 was asked for; next: "
    ranks = trained(folder, record=["--steps", "5:9"])
    for errors, told in ((dropping[1], counted), ([rank.err for rank in ranks], f"{ended}--steps 0:3")):
        assert errors[0].splitlines()[-1].startswith(f"shardproof: {told}")
        assert "shardproof:" not in errors[1]


def test_an_added_call_is_a_breach_and_named_with_its_line(folder: Path, recorded: tuple[Run, str]) -> None:
    trained(folder, "extra", record=["--steps", "0:3"])
    after = load(folder / "runs" / "latest")
    found = compare(snapshot(recorded[0], "before"), snapshot(after, "after"))
    assert found.breaches
    line = 1 + SCRIPT.read_text().splitlines().index("            dist.all_reduce(x.detach().sum())")
    for layer in ("0", "1"):
        assert any(f"forward all_reduce over world in {layer}, at training.py:{line}" in one for one in found.lines)


@pytest.mark.deep("half a CPU minute")
def test_the_gate_of_the_page_in_an_empty_repository_names_an_added_call(tmp_path: Path) -> None:
    """The commands of docs/record.md as they stand, and the training script of a repository that has nothing else."""
    page = (ROOT / "docs" / "record.md").read_text().partition("## A gate")[2]
    first, second = (
        [line.strip() for line in part.split("\n") if line.startswith("    ")] for part in page.split("and in CI")
    )
    script = SCRIPT.read_text().replace("int(sys.argv[1])", "4")
    (tmp_path / "train.py").write_text(script)

    def shell(command: str) -> subprocess.CompletedProcess[str]:
        tools = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        words = command.replace("shardproof", f"{sys.executable} -m shardproof", 1)
        return ran(tmp_path, *shlex.split(words), **tools)

    assert [shell(command).returncode for command in first] == [0, 0]
    lines = script.replace('if "extra" in sys.argv:', "if True:")
    (tmp_path / "train.py").write_text(lines)
    recorded, compared = (shell(command) for command in second)
    assert (recorded.returncode, compared.returncode) == (0, 1), compared.stderr
    line = 1 + lines.splitlines().index("            dist.all_reduce(x.detach().sum())")
    for layer in ("0", "1"):
        assert f"new: forward all_reduce over world in {layer}, at train.py:{line}" in compared.stdout


def test_a_killed_rank_leaves_what_it_did(folder: Path) -> None:
    assert [rank.ended() for rank in forked(folder, "training.py", "2", "kill", world=1, record=[])] == [-9]
    run = load(folder / "runs" / "latest")
    last = run.ledger.iloc[-1]
    assert (last["step"], last["phase"], last["op"]) == (1, "backward", "all_reduce")
    assert any("rank 0 came to no orderly end" in note for note in run.notes)
    torn = run.path / "ranks" / "0" / "ledger.csv"
    torn.write_text(torn.read_text() + "training.py,prog")
    again = load(run.path)
    assert len(again.ledger) == len(run.ledger)
    assert any("the last line is cut and left out: 1" in note for note in again.notes)


def test_a_recorder_that_fails_lets_the_program_go(folder: Path) -> None:
    """Started anew as a launcher does it, so that Python itself finds the recorder (harness.programs.hook)."""
    words = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": "1", "RANK": "0"}
    command = [sys.executable, "-m", "shardproof.record", "training.py", "3", "broken"]
    ended = ran(folder, *command, **words)
    assert ended.returncode == 0
    assert len(ended.stdout.splitlines()) == 3
    assert ended.stderr.count("is not recorded any further") == 1
    run = load(folder / "runs" / "latest")
    assert len(run.ledger)
    assert any("the recorder of rank 0 stopped" in note for note in run.notes)


@pytest.mark.deep("a CPU minute")
def test_memory_is_bounded_over_ten_thousand_steps(folder: Path) -> None:
    shutil.copy(SCRIPT.with_name("many_steps.py"), folder)
    (rank,) = forked(folder, "many_steps.py", world=1, record=[])
    assert rank.ended(600.0) == 0, rank.err
    full, at_the_end = map(int, rank.out.split())
    assert at_the_end - full < 4 * 2**20  # an event that is kept has 500 bytes and more, and 8,000 were issued
    assert len(load(folder / "runs" / "latest").ledger) > 20_000


WITHOUT_PYTHON = """
import _thread, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
options, sent = dist.AllreduceOptions(), torch.ones(3)
_thread.start_new_thread(dist.group.WORLD.allreduce, ([sent], options))  # as autograd's threads for a GPU call
end_s = time.monotonic() + 30
while float(sent[0]) != 2 and time.monotonic() < end_s:
    time.sleep(0.01)
dist.barrier()
assert sent.tolist() == [2.0] * 3, sent
"""


def test_calls_without_python_are_recorded_and_forked_ranks_end_in_order(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(WITHOUT_PYTHON)
    ranks = forked(tmp_path, "program.py", record=[])
    assert [rank.ended(LIMIT_S) for rank in ranks] == [0, 0], ranks[0].err
    run = load(tmp_path / "runs" / "latest")
    assert run.ledger[run.ledger["rank"] == 0]["op"].tolist() == ["all_reduce", "barrier"]
    (note,) = run.notes
    assert "no module, backward or optimizer was seen beside them" in note
    assert (run.path / "ranks" / "0" / "last.json").is_file()  # though without atexit
