"""`shardproof read`: a run folder that all reports take, what is unknown, hostile files, and a closed form."""

import gzip
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardproof.harness.dense_model import SUBJECT, read_case
from shardproof.harness.programs.meant import AgainstForm, compare_with_form
from shardproof.harness.subject import named_axes, resolve_subject, state_terms
from shardproof.harness.terms import EventKey, closed_forms
from shardproof.harness.traces.calls import Trace
from shardproof.harness.traces.kineto import trace_of
from shardproof.reports.commands.expect import lines_of_terms
from shardproof.reports.pages import page
from shardproof.reports.programs import figures
from shardproof.reports.programs.program_frames import program_frames
from shardproof.reports.stored.frames import load
from tests.harness.command_line import CommandLine
from tests.harness.traces.nccl_trace import Json, call, row, step, trace, two_steps, write_job, written


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    monkeypatch.chdir(tmp_path)
    return CommandLine(capsys)


def test_a_folder_of_traces_is_a_run_folder(run: CommandLine, tmp_path: Path) -> None:
    write_job(tmp_path / "job")
    status, out, _ = run("read", "job")
    assert status == 0
    assert "Traced program" in out and "On the device" in out and "Largest calls" in out
    assert "unknown: the module of all 8 calls; profile(with_stack=True)" in out
    ledger = load("runs/latest").ledger
    assert ledger["payload_bytes"].tolist() == [4096, 2048] * 4
    assert ledger["step"].tolist() == [7, 7, 8, 8] * 2
    assert set(ledger["axis"]) == {"world"} and set(ledger["microbatch"]) == {-1}
    # the kernel of the rank that comes last is the shortest
    assert figures.by_rank(load("runs/latest"))["late_us"].tolist() == [0.0, 7.5]
    assert figures.on_device(load("runs/latest"))["steps"].tolist() == [2, 2]
    frames = program_frames(load("runs/latest"))
    assert frames["device"]["share"].tolist() == pytest.approx([0.3, 0.6, 0.225, 0.45])
    assert frames["steps"]["unlike"].tolist() == [False, False]
    drawn = page.render_page(load("runs/latest"))
    pictures = drawn[drawn.index('id="pictures"') :]
    for words in ("What the device does in a step", "Payload by op, axis and phase", "Bandwidth by op and size"):
        assert f'aria-label="{words}"' in pictures
    for words in ("Late ranks", "Steps, and those that issue other calls than most", "The largest calls"):
        assert f'aria-label="{words}"' in pictures
    assert ">0.0075 ms, last in " in pictures and 'aria-label="Late ranks: late 0.0075 ms"' in pictures
    assert run("show", "runs/latest")[1] == out
    for command in ("page", "trace", "expect"):
        assert run(command, "runs/latest")[0] == 0
    assert (
        'Term(op="all_reduce", axis="world", group_size=2, dtype="float32", payload_bytes=4096, calls=2)'
        in run("expect", "runs/latest")[1]
    )
    lacks = "unknown: some of the steps 8:11, for the trace has 8:9 (rank 1)"
    assert lacks in run("read", "job", "--steps", "8:11")[1]
    status, out, _ = run("read", "job", "--steps", "8:9")
    assert status == 0 and "some of the steps" not in out
    assert load("runs/latest").ledger["step"].tolist() == [8, 8, 8, 8]
    assert "the traces have the steps 7 8; legal: --steps 7:9" in run.refused("read", "job", "--steps", "1:4")


def test_what_a_trace_does_not_know_is_empty_in_the_ledger_and_no_zero_anywhere(
    run: CommandLine, tmp_path: Path
) -> None:
    bare = [row("record_param_comms", "cpu_op", 10, 10), row("nccl:all_reduce", "user_annotation", 12, 6)]
    written(tmp_path / "old.json", trace([*bare], 1))
    status, out, _ = run("read", "old.json")
    assert status == 0
    cells = (tmp_path / "runs" / "latest" / "ranks" / "1" / "ledger.csv").read_text().splitlines()
    told = dict(zip(cells[0].split(","), cells[1].split(","), strict=True))
    numbers = ("step", "microbatch", "group_size", "payload_bytes", "wire_bytes", "is_async", "duration_us")
    assert [told[name] for name in numbers] == [""] * 7
    assert [told[name] for name in ("phase", "region", "dtype", "reduce_op", "axis")] == ["?"] * 5
    assert "0.000" not in out
    for name in ("payload", "dtype", "size of the group", "step", "phase", "module", "duration", "reduce op"):
        assert f"unknown: the {name} of the only call; " in out
    assert "unknown: all calls of rank 0 of 2, which left no trace" in out
    shown = load("runs/latest")
    assert "unknown: the payload" in page.render_page(shown)
    modes = run("compare", "runs/latest")[1].partition("Modes side by side")[2].splitlines()[3]
    assert set(modes.split()) == {"program", "2", "old.json", "-", "?"}
    assert [str(line.term) for line in lines_of_terms(shown, "old.json")] == ['Term(op="all_reduce", calls=1)']
    assert "bytes: are not judged" in run("compare", "runs/latest", "runs/latest", "--fail", "bytes:0")[1]


def test_traces_are_compared_whatever_their_steps_and_ranks(run: CommandLine, tmp_path: Path) -> None:
    later = [{**event, "name": event["name"].replace("#7", "#107").replace("#8", "#108")} for event in two_steps()]
    grown = [*later, *call("all_reduce", 4096, 300)]
    for name, rows, rank in (("base", two_steps(), 0), ("same", later, 1), ("grown", grown, 1)):
        written(tmp_path / f"{name}.json", trace(rows, rank))
        assert run("read", f"{name}.json", "--out", name)[0] == 0
    gate = ("--fail", "bytes:0", "--fail", "calls:0", "--fail", "events:0")
    status, out, _ = run("compare", "base/latest", "same/latest", *gate)
    assert status == 0, out
    assert "the ranks are 0 and 1, so events are compared without the rank" in out
    status, out, _ = run("compare", "base/latest", "grown/latest", *gate)
    assert status == 1
    assert run("compare", "base.json", "same/latest", *gate)[0] == 0
    assert run("compare", "base.json", "grown.json", *gate)[0] == 1
    assert "all_reduce (?) of float32 ?, 4,096 bytes" in out and "exceeds --fail calls:0" in out


def test_steps_that_differ_are_told_and_sizes_of_uneven_all_to_alls_differ_by_themselves(run: CommandLine) -> None:
    def found(*sizes: int, split: str) -> str:
        rows = [step(number, number * 100, 100) for number in range(len(sizes))]
        for number, size in enumerate(sizes):
            more: Json = {"In split size": split}
            rows += call("all_to_all", size, number * 100 + 20, **more)
        written(Path("x.json"), trace(rows))
        return run("read", "x.json")[1]

    assert "step 2, unlike steps 0..1: 1 more, first" in found(64, 64, 128, split="[]")
    assert ", unlike " not in found(64, 64, 128, split="[1, 2, ...]")


SPOILT: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut": (lambda text: text[: len(text) // 2], "is cut, or is no trace"),
    "cut between events": (lambda text: text[: text.rindex(b"}\n  ]") + 1], "it ends in the middle of its events"),
    "cut gzip": (lambda text: gzip.compress(text)[:-20], "is packed and cut or broken"),
    "torn gzip": (lambda text: gzip.compress(text)[:40] + b"?" * 400, "is packed and cut or broken"),
    "negative": (lambda text: text.replace(b'"dur": 10', b'"dur": -10'), "must be at least 0"),
    "no number": (lambda text: text.replace(b'"dur": 10', b'"dur": "x"'), "could not convert"),
    "elements": (lambda text: text.replace(b'"In msg nelems": 1024', b'"In msg nelems": -1'), "must be at least 0"),
    "another world": (lambda text: text.replace(b'"rank": 0', b'"rank": 5'), "is of rank 5 in a world of 2 ranks"),
    "huge world": (lambda text: text.replace(b'"world_size": 2', b'"world_size": 99999999'), "legal: at most 1048576"),
    "another group": (lambda text: text.replace(b"[0, 1]", b"[1, 2]"), "calls in group 0 of ranks 1 2"),
    "no events": (lambda text: text.replace(b'"traceEvents"', b'"events"'), "there are no traceEvents in it"),
    "no object": (lambda text: b"MZ\x90" + text, "is of no known format"),
    "empty": (lambda text: b"", "is of no known format"),
    "nested": (
        lambda text: text.replace(b'"args": {', b'"args": ' + b'{"a":' * 100_000 + b"{", 1),
        "is cut, or is no trace",
    ),
    "a list of numbers": (lambda text: b"[1, 2]", "must be an object"),
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_hostile_file_is_refused_in_one_sentence(run: CommandLine, tmp_path: Path, how: str) -> None:
    spoil, words = SPOILT[how]
    path = written(tmp_path / "x.json", trace(two_steps()))
    path.write_bytes(spoil(path.read_bytes()))
    assert words in run.refused("read", "x.json")
    assert not (tmp_path / "runs").exists()


def test_ranks_come_from_files_or_their_names_and_each_once(run: CommandLine, tmp_path: Path) -> None:
    for name in ("a_rank0.json", "b_rank0.json", "worker1.json"):
        written(tmp_path / name, trace(two_steps(), None))
    assert "b_rank0.json: rank 0 is in a_rank0.json too" in run.refused("read", "a_rank0.json", "b_rank0.json")
    assert "legal: --rank-regex 'worker(\\d+)'" in run.refused("read", "worker1.json")
    assert run("read", "worker1.json", "--rank-regex", r"worker(\d+)")[0] == 0
    assert load("runs/latest").ledger["rank"].unique().tolist() == [1]
    assert "has no group for the rank" in run.refused("read", "worker1.json", "--rank-regex", "worker")
    assert "no such file or folder" in run.refused("read", "nothing.json")
    written(tmp_path / "other.json", trace(two_steps(), 0, world_size=4, groups={"0": (0, 1)}))
    written(tmp_path / "one.json", trace(two_steps(), 1))
    assert "of a world of 4 ranks" in run.refused("read", "other.json", "one.json")


FULL = "layers=2 hidden=16 heads=2 vocab=24 seq=8 micro=2 steps=2"
SUBJECT_CALL = resolve_subject(SUBJECT).call


def job_of(text: str) -> list[Trace]:
    """Traces of a job that issued exactly the calls of a case, two steps long, on all its ranks."""
    case = read_case(text)
    axes, terms = named_axes(case, SUBJECT_CALL), state_terms(case, SUBJECT_CALL)
    assert terms is not None
    groups = {f"{axis}{n}": ranks for axis, lists in axes.items() for n, ranks in enumerate(lists)}
    traces = []
    for rank, form in closed_forms(terms, range(case.world_size), axes).items():
        rows = [step(5, 0, 1e6), step(6, 1e6, 1e6)]
        for key, calls in form.complete.items():
            name = next(
                name for name, ranks in groups.items() if rank in ranks and name.rstrip("0123456789") == key.axis
            )
            for number in range(calls):
                at = (number % 2) * 1e6 + len(rows) * 20
                rows += call(key.op, key.payload_bytes, at, dtype=key.dtype, group=name, ranks=groups[name])
        made = trace(rows, rank, case.world_size, groups)
        for one in made["distributedInfo"]["pg_config"]:
            one["pg_desc"] = f"mesh_{one['pg_name'].rstrip('0123456789')}"
        traces.append(trace_of(made["traceEvents"], made, f"rank{rank}.json"))
    return traces


def with_places(traces: list[Trace], text: str) -> list[Trace]:
    """The job of `job_of` with the phases of the closed form, and a module for each of its regions."""
    case = read_case(text)
    forms = closed_forms(state_terms(case, SUBJECT_CALL) or (), range(case.world_size), named_axes(case, SUBJECT_CALL))
    found = []
    for bare in traces:
        left: dict[tuple[object, ...], list[EventKey]] = {}
        for key, number in forms[bare.rank or 0].complete.items():
            left.setdefault((key.op, key.payload_bytes, key.dtype, key.axis), []).extend([key] * number)
        calls = []
        for one in bare.calls:
            key = left[one.op, one.payload_bytes, one.dtype, one.group_desc.removeprefix("mesh_")].pop(0)
            calls.append(replace(one, phase=key.phase, module=key.region.replace("layers", "Block")))
        found.append(replace(bare, calls=tuple(calls)))
    return found


def test_phases_are_compared_where_a_trace_knows_them_and_modules_by_their_number() -> None:
    tp = f"mode=tp tp=2 dp=2 {FULL}"
    job = with_places(job_of(tp), tp)
    right = compare_with_form(job, read_case(tp), SUBJECT_CALL)
    assert (right.unmeant, right.notes) == ((), ("not compared: reduce op, which traces of torch do not hold",))

    def changed(**changes: Any) -> AgainstForm:
        first = next(i for i, one in enumerate(job[1].calls) if one.phase == "backward" and one.module)
        calls = [*job[1].calls]
        calls[first] = replace(calls[first], **changes)
        return compare_with_form([job[0], replace(job[1], calls=tuple(calls)), *job[2:]], read_case(tp), SUBJECT_CALL)

    (late,) = changed(phase="grad_sync").unmeant
    assert str(late).startswith("other phase: 1 call, all_reduce of ")
    assert " over tp (2 ranks) in grad_sync, where backward is meant, on rank 1; first in step" in str(late)
    assert changed(phase="grad_sync", is_phase_annotated=True).unmeant == ()
    assert "not compared: phase, not known for 1 of" in changed(phase="").notes[0] and not changed(phase="").unmeant
    elsewhere = changed(module="Block.9")
    assert elsewhere.unmeant == () and "other modules: all_reduce of " in elsewhere.notes[0]
    assert " in backward comes from " in elsewhere.notes[0] and elsewhere.notes[0].endswith("(rank 1)")


def against(traces: list[Trace], text: str) -> list[str]:
    return [str(one) for one in compare_with_form(traces, read_case(text), SUBJECT_CALL).unmeant]


def test_a_trace_of_a_layout_has_the_calls_of_its_closed_form_and_of_no_neighbour() -> None:
    tp = f"mode=tp tp=2 dp=2 {FULL}"
    job = job_of(tp)
    assert against(job, tp) == []
    other = against(job, tp.replace("mode=tp", "mode=tp-sp"))
    assert {line.partition(":")[0] for line in other} <= {"missing", "extra", "other bytes"}
    assert any(line.startswith("missing") and "all_gather" in line for line in other)
    more = against(job, tp.replace("micro=2", "micro=3"))
    assert more and all(line.startswith("missing") for line in more)
    bucketed = against(job_of(f"{tp} bucket=500"), f"{tp} bucket=1000")
    assert bucketed and all("over dp (2 ranks)" in line for line in bucketed)
    staged = f"mode=tp tp=2 pp=2 {FULL}"
    tp_sp = staged.replace("mode=tp", "mode=tp-sp")
    assert against(job_of(staged), staged) == []
    gloo = [  # whose messages have no groups
        replace(
            one,
            calls=tuple(
                replace(call, group=(), group_size=None, group_desc="") if call.op in ("send", "recv") else call
                for call in one.calls
            ),
        )
        for one in job_of(staged)
    ]
    assert against(gloo, staged) == []
    assert any(line.startswith("missing") and "over tp (2 ranks)" in line for line in against(gloo[:1], tp_sp))
    isp = f"mode=isp tp=2 {FULL}"
    bare = [replace(one, calls=tuple(replace(call, group_desc="") for call in one.calls)) for one in job_of(isp)]
    assert against(bare, isp) == [], "axes with the same ranks are one group"


def test_each_difference_of_a_trace_is_named_and_nothing_else() -> None:
    tp = f"mode=tp tp=2 dp=2 {FULL}"
    job = job_of(tp)

    def spoilt(**changes: Any) -> list[str]:
        first = next(i for i, one in enumerate(job[1].calls) if one.op == "all_reduce" and one.group_desc == "mesh_tp")
        calls = list(job[1].calls)
        calls[first] = replace(calls[first], **changes)
        return against([job[0], replace(job[1], calls=tuple(calls)), *job[2:]], tp)

    (size,) = spoilt(payload_bytes=12)
    assert size.startswith("other bytes: 1 call, all_reduce of 12 B float64 over tp (2 ranks), where")
    assert " B float64 is meant, on rank 1; first in step 5" in size
    (group,) = spoilt(group=(1, 3), group_desc="mesh_dp")
    assert (
        group.startswith("other group: 1 call, all_reduce of")
        and "over dp (2 ranks), where tp (2 ranks) is meant" in group
    )
    lacking = [job[0], replace(job[1], calls=job[1].calls[1:]), *job[2:]]
    (missing,) = against(lacking, tp)
    assert missing.startswith("missing: 1 call, ") and "on rank 1; meant in " in missing
    again = [job[0], replace(job[1], calls=(*job[1].calls, job[1].calls[0])), *job[2:]]
    (extra,) = against(again, tp)
    assert extra.startswith("extra: 1 call, ") and "on rank 1; first in step 5" in extra


def test_read_with_a_case_ends_with_status_1_where_calls_differ(run: CommandLine, tmp_path: Path) -> None:
    written(tmp_path / "x.json", trace(two_steps()))
    status, out, _ = run("read", "x.json", "--case", "mode=tp tp=2 layers=1")
    assert status == 1 and "missing: " in out and "other " in out
    assert "not compared: reduce op" in out and "not compared: phase and module, of traces without modules" in out
    again = run("read", "x.json", "--subject", SUBJECT, "mode=tp tp=2 layers=1")
    assert (again[0], again[1].partition("not compared")[2]) == (1, out.partition("not compared")[2])
    assert "its layout (tp=4) has 4 ranks, and the job of the traces has 2" in run.refused(
        "read", "x.json", "--case", "mode=tp tp=4 kv_heads=4"
    )
