"""A run folder written by hand, by the contract and not by the harness: what the tests of `reports` read.

And `stored`, what the harness writes.
Two ranks; `mode=tp tp=2` and `mode=tp-sp tp=2` at sizes that can be added up by hand, in bytes: an activation is 4096.
"""

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardproof.harness.ledger import COLUMNS, Event, wire_bytes
from shardproof.harness.running.result import ledger_rows
from shardproof.harness.running.store import Store, environment
from shardproof.harness.running.summary import summarize
from shardproof.harness.verdicts.facts import state_text
from shardproof.harness.verdicts.verdict import Verdict
from shardproof.reports.stored.frames import Run, frame_of

ACTIVATION_BYTES = 4096
TP, TP_SP = "mode=tp tp=2", "mode=tp-sp tp=2 seq=64"
MESSAGE = """what:   grad/layers.0.mlp.w1.weight differs from the dense model (check update)
where:  mode=tp, rank 1 of 2, step 0, phase backward, module layers.0.mlp.w1
error:  frobenius error 0.012 (5.4e+13 eps), allowed 1e-09 (4.5e+06 eps); 1 tensor of this check wrong
first:  backward of layers.0.mlp in step 0: act_grad/layers.0.mlp
causes: a missing all_reduce of the input gradient <b>
repeat: shardproof run "mode=tp tp=2\""""
FAILURE = {
    "where": {"mode": "tp", "world_size": 2, "ranks": [1], "step": 0, "phase": "backward", "region": "layers.0.mlp.w1"},
    "wrong": [{"name": "grad/layers.0.mlp.w1.weight", "measure": "frobenius", "error": 1.2e-2, "allowed": 1e-9}],
    "unit": 2**-52,
    "first": {"phase": "backward", "region": "layers.0.mlp", "step": 0, "name": "act_grad/layers.0.mlp"},
    "causes": [
        {
            "id": "not_summed",
            "fact": {"id": "text", "values": {"text": "a missing all_reduce of the input gradient <b>"}},
        }
    ],
    "repeat": 'shardproof run "mode=tp tp=2"',
}
"""The facts of MESSAGE, by the contract of verdicts.jsonl."""

Call = tuple[str, str, str, int]
"""Phase, region, op, calls; each carries one activation over axis tp."""
CALLS: dict[str, tuple[Call, ...]] = {
    TP: (
        ("forward", "layers.0.attention.wo", "all_reduce", 3),
        ("loss", "", "all_reduce", 1),
        ("backward", "layers.0.mlp.w1", "all_reduce", 2),
    ),
    TP_SP: (
        ("forward", "layers.0.attention.wqkv", "all_gather", 2),
        ("forward", "layers.0.attention.wo", "reduce_scatter", 2),
        ("backward", "layers.0.mlp.w1", "all_gather", 4),
    ),
}


def events(case: str, calls: Iterable[Call]) -> list[Event]:
    """The ledger of one case: the same calls on both ranks."""
    own = [call for *call, count in calls for _ in range(count)]
    return [_event(case, rank, index, *call) for rank in range(2) for index, call in enumerate(own)]


def _event(case: str, rank: int, index: int, phase: str, region: str, op: str) -> Event:
    return Event(
        case=case,
        mode=_words(case)["mode"],
        world_size=2,
        rank=rank,
        step=0,
        microbatch=0,
        phase=phase,
        region=region,
        op=op,
        reduce_op="" if op == "all_gather" else "sum",
        axis="tp",
        group_size=2,
        dtype="float64",
        shape="2x4x64",
        payload_bytes=ACTIVATION_BYTES,
        wire_bytes=wire_bytes(op, ACTIVATION_BYTES, 2),
        is_async=index % 2 == 1,
        call_index=index,
        start_us=100.0 * index + 0.1,
        duration_us=12.345678901234567,
        caller="parallel/layers/linear.py:10",
        group=(0, 1),
    )


def row(event: Event) -> tuple[Any, ...]:
    """Event as a row of ledger.csv."""
    return tuple(getattr(event, column) for column in COLUMNS)


def verdict(case: str, check: str, word: str = "pass", error: float | None = 2e-16, allowed: float = 1e-9) -> Any:
    """Line of verdicts.jsonl."""
    worst = {"name": "grad/layers.0.mlp.w1.weight", "error": error, "allowed": allowed, "epsilons": 1.0}
    return {
        "case": case,
        "check": check,
        "verdict": word,
        "worst": worst if error is not None else None,
        "facts": [{"id": "differs", "values": {"name": "grad/layers.0.mlp.w1.weight"}}] if word == "fail" else [],
        "notes": [{"kind": "undecided", "names": ["logits/0", "logits/1", "act/head"]}] if check == "forward" else [],
        "failure": FAILURE if word == "fail" else None,
    }


def with_records(run: Run, records: Iterable[Verdict]) -> Run:
    """The run with these verdicts in place of its own."""
    known = tuple(records)
    return replace(run, records=known, verdicts=frame_of(known).assign(mode="tp"))


def write(folder: Path, *, failing: bool = False, expected: bool = True) -> Path:
    """A complete run folder: all pass, or one failing check; with or without an expectation."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "env.json").write_text(
        json.dumps({"layout": 3, "torch": "2.13.0", "command": "shardproof run", "cores": 2})
    )
    sizes = {"world_size": 2, "tokens": 64, "micro": 1, "steps": 1}
    cases = [{"case": case, "mode": _words(case)["mode"], **sizes} for case in CALLS]
    (folder / "cases.jsonl").write_text("".join(json.dumps(case) + "\n" for case in cases))
    table(folder / "ledger.csv", COLUMNS, (row(e) for case in CALLS for e in events(case, CALLS[case])))
    by_rank = ("min_calls", "min_payload_bytes", "min_wire_bytes", "ranks_apart")
    summary_columns = (*SUMMARY, "expected_calls", "expected_payload_bytes", *by_rank)
    table(folder / "summary.csv", summary_columns, (row for case in CALLS for row in _summary(case, expected)))
    verdicts = [verdict(case, check) for case in CALLS for check in ("forward", "gradients")]
    verdicts += [verdict(case, "replicas", error=0.0, allowed=0.0) for case in CALLS]
    verdicts += [verdict(TP, "update", "fail", error=1.2e-2)] if failing else []
    (folder / "verdicts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in verdicts))
    if failing:
        header = ("case", "name", "step", "phase", "region", "error", "allowed", "first")
        table(folder / "errors.csv", header, ((TP, *row) for row in ERRORS))
    table(folder / "timings.csv", ("case", "seconds"), ((case, 0.25) for case in CALLS))
    held = ((case, rank, (rank + 1) * ACTIVATION_BYTES) for case in CALLS for rank in range(2))
    table(folder / "memory.csv", ("case", "rank", "saved_bytes"), held)
    return folder


ERRORS = (
    ("act/embedding.tokens", 0, "forward", "embedding.tokens", 1e-16, 1e-9, ""),
    ("act/layers.0.mlp.w1", 0, "forward", "layers.0.mlp.w1", 2e-16, 1e-9, ""),
    ("logits/0", 0, "forward", "", 3e-16, 1e-9, ""),
    ("grad/layers.0.mlp.w1.weight", 0, "backward", "layers.0.mlp.w1", 1.2e-2, 1e-9, ""),
    ("act_grad/layers.0.mlp", 0, "backward", "layers.0.mlp", 3.2e-9, 1e-9, ""),
    ("logits/1", 1, "forward", "", float("inf"), 1e-9, ""),
    ("param/layers.0.mlp.w1.weight", 1, "step", "layers.0.mlp.w1", 5e-5, 1e-9, ""),
    ("", 0, "backward", "layers.0.mlp", 0.0, 0.0, "yes"),
)
"""All tensors of the failing case with their errors; the last row is the first place."""
SUMMARY = ("case", "mode", "phase", "op", "axis", "group_size", "calls", "payload_bytes", "wire_bytes")


def _summary(case: str, expected: bool) -> Iterator[tuple[Any, ...]]:
    for phase, _, op, count in CALLS[case]:
        payload = count * ACTIVATION_BYTES
        wire = count * wire_bytes(op, ACTIVATION_BYTES, 2)
        beside = (count, payload) if expected else ("", "")
        yield (case, _words(case)["mode"], phase, op, "tp", 2, count, payload, wire, *beside, "", "", "", "")


PASSED = Verdict(case="", check="forward", verdict="pass", facts=(state_text(""),))


def stored(out: Path, planned: Iterable[str], finished: Iterable[list[Event]], verdict: Verdict = PASSED) -> Path:
    """A run folder that the harness writes: these cases, and of those that finished the events and one verdict."""
    store = Store(out, "toy", environment(["shardproof", "run"], {"subject": "toy"}))
    words = {case: _words(case) for case in planned}
    store.plan({"case": c, "mode": own["mode"], "world_size": int(own["tp"])} for c, own in words.items())
    for events in finished:
        case, ranks = events[0].case, events[0].world_size
        rows = summarize(case, events[0].mode, ranks, events, None)
        store.add(case, ledger_rows(events), rows, [replace(verdict, case=case)], {"recorded": 0.25}, [1000] * ranks)
    store.close()
    return store.path


def _words(case: str) -> dict[str, str]:
    """The words of a case; mode and tp are those of the default case where it names none."""
    return {"mode": "tp", "tp": "2"} | dict(word.split("=", 1) for word in case.split())


def table(path: Path, header: Iterable[str], rows: Iterable[tuple[Any, ...]]) -> None:
    """Write a CSV file."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(list(header))
        writer.writerows(rows)
