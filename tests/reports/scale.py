"""A ledger of many events written, loaded, summarised and compared: how long it takes and how much memory.

    python -m tests.reports.scale --events 1000000 --out DIR

A line a part is printed, all counted from the start: seconds, seconds of the processor, and the most resident memory in
MiB. Seconds of the processor are what remains when other work keeps the machine busy.
"""

import argparse
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from harness.checking.evidence import Verdict
from harness.ledger import Event, wire_bytes
from harness.running.result import ledger_rows
from harness.running.store import Store, environment
from harness.running.summary import summarize
from reports.comparing.comparison import compare
from reports.comparing.snapshot import save, side, snapshot
from reports.stored.frames import load
from reports.stored.summary import headline, traffic

_RANKS, _STEPS, _LAYERS, _PER_CASE = 8, 5, 50, 100_000
_PHASES = ("forward", "backward")


def events(case: str, count: int, mode: str) -> Iterator[Event]:
    """`count` events of one case: every rank, step and layer forward and backward, over and over."""
    for number in range(count):
        rest, rank = divmod(number, _RANKS)
        index, layer = rest, rest % _LAYERS
        phase, step = _PHASES[rest // _LAYERS % 2], rest // (2 * _LAYERS) % _STEPS
        payload = 4096 * (1 + layer % 7)
        yield Event(
            case=case,
            mode=mode,
            world_size=_RANKS,
            rank=rank,
            step=step,
            microbatch=rest // (2 * _LAYERS * _STEPS),
            phase=phase,
            region=f"layers.{layer}.mlp.w1",
            op="all_reduce",
            reduce_op="sum",
            axis="tp",
            group_size=_RANKS,
            dtype="bfloat16",
            shape=f"{payload // 2}",
            payload_bytes=payload,
            wire_bytes=wire_bytes("all_reduce", payload, _RANKS),
            is_async=False,
            call_index=index,
            start_us=12.5 * index,
            duration_us=10.0 + layer,
            group=tuple(range(_RANKS)),
            caller="parallel/layers/linear.py:10",
        )


def written(out: Path, count: int) -> Path:
    """A run folder with `count` events, in cases of at most a hundred thousand."""
    store = Store(out, "scale", environment(["scale"], {"subject": "scale"}))
    cases = [(f"mode=tp tp=8 seed={seed}", min(_PER_CASE, count - start)) for seed, start in
             enumerate(range(0, count, _PER_CASE))]  # fmt: skip
    store.plan({"case": case, "mode": "tp", "world_size": _RANKS} for case, _ in cases)
    for case, share in cases:
        rows = list(events(case, share, "tp"))
        passed = Verdict(case=case, check="forward", verdict="pass", worst=None, message="")
        store.add(case, ledger_rows(rows), summarize(case, "tp", _RANKS, rows, None), [passed], {"recorded": 1.0})
    store.close()
    return store.path


def measured(out: Path, count: int) -> Iterator[tuple[str, float, float, float]]:
    """(part, seconds, processor's seconds, most MiB) after every part, since the start."""
    start_s, start_busy_s = time.perf_counter(), time.process_time()

    def now(part: str) -> tuple[str, float, float, float]:
        most_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        return part, time.perf_counter() - start_s, time.process_time() - start_busy_s, most_mib

    folder = written(out, count)
    yield now("written")
    run = load(folder)
    yield now("loaded")
    lines = traffic(run), headline(run)
    assert len(run.ledger) == count and int(lines[0]["calls"].sum()) * _RANKS == count
    yield now("summarised")
    new = snapshot(run)
    save(new, "scale", str(out / "baselines"))
    yield now("kept as baseline")
    found = compare(side("scale", str(out / "baselines")), new)
    assert found.events.empty and not found.breaches
    yield now("compared")


def main(arguments: list[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args(arguments)
    for part, seconds, busy_s, most_mib in measured(asked.out, asked.events):
        print(f"{part:18} {seconds:7.1f} s {busy_s:7.1f} s busy {most_mib:7.0f} MiB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
