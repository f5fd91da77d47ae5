"""The cost model, held against this machine: links and products measured here, calls and steps predicted from them.

    python -m bench.cost_table     prints the table, writes costs.csv and cluster.toml

Three numbers are fitted. Two are latency and bandwidth of one link, to the all-reduce of two ranks at the smallest and
the largest payload. The third is the rate of products on two ranks at once. Every other row is a prediction by the
formulas of `shardproof predict`: other ops, other payloads, four ranks, a step of every mode. Where gloo does more than
an op needs (its reduce-scatter is an all-reduce), the table shows it. `cluster.toml` is this machine as `shardproof
predict --cluster` reads it. Times are microseconds; payloads are bytes as the ledger counts them.
"""

import argparse
import csv
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from bench.witnesses import micro_batch
from shardproof.harness.engines.engine import Engine
from shardproof.harness.engines.shapes.dry import DryEngine
from shardproof.harness.errors import MachineError
from shardproof.harness.predicting.clusters import Cluster, Device, Link
from shardproof.harness.predicting.costs import route, seconds
from shardproof.harness.predicting.forecast import forecast
from shardproof.harness.predicting.timeline import AFTER_BACKWARD
from shardproof.harness.running.engines import engine_named
from shardproof.parallel.subject import subject
from shardproof.reference.case import Case
from shardproof.reference.language.modes import MODES
from shardproof.reports.printing.text import show_table
from shardproof.reports.printing.text_tables import Table

CALLS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
PAYLOADS = (4 << 10, 64 << 10, 512 << 10, 4 << 20)
"""From what a small model sends to what a large one does."""
STEP = "mode={mode} tp=2 layers=2 hidden=256 heads=8 kv_heads=8 ffn=1024 seq=128 batch=4 micro=1 dtype=float32"
_ITEM = 4
_PRODUCT = 512
"""Rows and columns of the products that are timed."""
_LIMIT_S = 120.0
# torch 2.13 warns of the names that 2.11 has.
_gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Callable[..., object] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class CostRow(NamedTuple):
    """A row of `costs.csv`: the measured time, the model's, and the first over the second.

    `fitted`: the model was made from this row, so that it must agree.
    """

    what: str
    ranks: int
    payload_bytes: int
    measured_us: float
    predicted_us: float
    fitted: bool

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured_us / self.predicted_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Measurements to make: sizes of worlds, payloads, steps of which modes, and rounds of each."""

    worlds: tuple[int, ...] = (2, 4)
    payloads: tuple[int, ...] = PAYLOADS
    modes: tuple[str, ...] = tuple(MODES)
    step: str = STEP
    rounds: int = 15


def call_seconds(rank: int, op: str, payload_bytes: int, rounds: int) -> list[float]:
    """Of one rank: how long the call took in every round; all ranks begin a round together."""
    ranks = dist.get_world_size()
    numel = payload_bytes // _ITEM
    whole, part = torch.ones(numel), torch.ones(numel // ranks)
    made: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: _gather(whole, part),
        "reduce_scatter": lambda: _scatter(part, whole),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
    }
    return _timed(made[op], rounds)


def product_seconds(rank: int, rounds: int) -> list[float]:
    """Of one rank: how long a product of two float32 matrices [512, 512] takes while the other ranks make theirs."""
    left, right = torch.ones(_PRODUCT, _PRODUCT), torch.ones(_PRODUCT, _PRODUCT)
    return _timed(lambda: left @ right, rounds)


def step_seconds(rank: int, text: str, rounds: int) -> list[float]:
    """Of one rank: forward and backward of one micro-batch, in every round."""
    return _timed(micro_batch(Case.parse(text)), rounds)


def _timed(run: Callable[[], object], rounds: int) -> list[float]:
    run()
    taken = []
    for _ in range(rounds):
        dist.barrier()
        start_s = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start_s)
    return taken


def measured(engine: Engine, asked: Asked) -> tuple[dict[tuple[str, int, int], float], float]:
    """(op or mode, ranks, payload) -> microseconds, payload 0 for a step; and FLOP/s of two ranks that compute."""

    def timed(program: Callable[..., list[float]], *words: object, ranks: int) -> float:
        by_rank = engine.run(program, *words, asked.rounds, world_size=ranks, timeout_s=_LIMIT_S)
        slowest = map(max, zip(*by_rank, strict=True))
        return float(statistics.median(slowest)) * 1e6

    times = {
        (op, ranks, payload): timed(call_seconds, op, payload, ranks=ranks)
        for ranks in asked.worlds
        for op in CALLS
        for payload in asked.payloads
    }
    times |= {(mode, 2, 0): timed(step_seconds, asked.step.format(mode=mode), ranks=2) for mode in asked.modes}
    return times, 2 * _PRODUCT**3 / (timed(product_seconds, ranks=2) * 1e-6)


def fitted(small: tuple[int, float], large: tuple[int, float], flops_per_s: float) -> Cluster:
    """The machine whose all-reduce of two ranks takes 2 a + n b: two (payload bytes, microseconds), and products.

    Raises MachineError when the times are no straight line upwards: the machine was busy with something else.
    """
    byte_us = (large[1] - small[1]) / (large[0] - small[0])
    latency_us = (small[1] - small[0] * byte_us) / 2
    if not (byte_us > 0 and latency_us > 0):
        cause = f"all-reduces of {small[0]} and {large[0]} bytes took {small[1]:.0f} and {large[1]:.0f} us"
        problem = f"{cause}: no latency and bandwidth fit that; repeat on a quieter machine"
        raise MachineError(problem, ranks=(), positions=())
    return Cluster(
        name="measured",
        device=Device(name="one core", memory_gib=1.0, peak_tflops={"float32": flops_per_s / 1e12}, efficiency=1.0),
        links=(Link(name="gloo", ranks=0, latency_us=latency_us, bandwidth_gb_s=1e-3 / byte_us),),
        note="measured by python -m bench.cost_table; memory_gib is no measurement",
    )


def held_against(times: dict[tuple[str, int, int], float], cluster: Cluster, asked: Asked) -> list[CostRow]:
    """Every time beside what the model says for this cluster."""
    ends = (min(asked.payloads), max(asked.payloads))
    rows = []
    with DryEngine() as engine:
        for (what, ranks, payload), us in times.items():
            if payload:
                name, says_s = what, seconds(what, payload, route(range(ranks), cluster))
            else:
                name = f"micro-batch, {what}"
                says_s = _micro_batch_s(asked.step.format(mode=what), cluster, engine)
            fitted = (what, ranks) == ("all_reduce", 2) and payload in ends
            rows.append(CostRow(name, ranks, payload, us, says_s * 1e6, fitted))
    return rows


def _micro_batch_s(text: str, cluster: Cluster, engine: DryEngine) -> float:
    """Forward and backward of one micro-batch: a step without what follows the backward."""
    times = forecast(Case.parse(text), subject, cluster, engine, timeout_s=_LIMIT_S).times
    after: float = sum(times.exposed_s.get(phase, 0.0) for phase in AFTER_BACKWARD)
    return times.total_s - after


def written(cluster: Cluster) -> str:
    """The cluster as TOML, as `harness.predicting.clusters` reads it."""

    def lines(values: dict[str, object]) -> list[str]:
        return [f"{name} = {_toml(value)}" for name, value in values.items()]

    head = {"name": cluster.name, "algorithm": cluster.algorithm, "note": cluster.note}
    text = [*lines(dict(head)), "", "[device]", *lines(asdict(cluster.device))]
    for link in cluster.links:
        text += ["", "[[links]]", *lines(asdict(link))]
    return "\n".join(text) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_toml(one)}" for name, one in value.items()) + " }"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def main(arguments: Sequence[str] = ()) -> int:
    """Measure, predict, print, write: what `python -m bench.cost_table` calls. 3 when the machine fits no model."""
    parser = argparse.ArgumentParser(prog="python -m bench.cost_table", description="The cost model, compared here.")
    parser.add_argument("--out", type=Path, default=Path("runs") / "bench", help="folder of the files (runs/bench)")
    parser.add_argument("--rounds", type=int, default=Asked().rounds, help="rounds of every row (15)")
    options = parser.parse_args(arguments)
    asked = Asked(rounds=max(1, options.rounds))
    try:
        with engine_named("pool") as engine:
            times, flops_per_s = measured(engine, asked)
        small, large = ((size, times["all_reduce", 2, size]) for size in (min(asked.payloads), max(asked.payloads)))
        cluster = fitted(small, large, flops_per_s)
    except MachineError as error:
        print(f"python -m bench.cost_table: {error}", file=sys.stderr)
        return error.exit_status
    rows = held_against(times, cluster, asked)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "cluster.toml").write_text(written(cluster), encoding="utf-8")
    with (options.out / "costs.csv").open("w", newline="") as file:
        cells = [(*row, round(row.ratio, 3)) for row in rows]
        csv.writer(file).writerows([(*CostRow._fields, "ratio"), *cells])
    show_table(table(rows, cluster), sys.stdout)
    return 0


def table(rows: Sequence[CostRow], cluster: Cluster) -> Table:
    """The rows, and how far the predictions among them are off: the median of max(ratio, 1/ratio)."""

    def off(chosen: Sequence[CostRow]) -> str:
        if not chosen:
            return "-"
        return f"{statistics.median(math.exp(abs(math.log(row.ratio))) for row in chosen):.2f}x"

    calls = [row for row in rows if row.payload_bytes and not row.fitted]
    by_ranks = {ranks: [row for row in calls if row.ranks == ranks] for ranks in sorted({row.ranks for row in calls})}
    errors = [f"calls of {ranks} ranks {off(chosen)}" for ranks, chosen in by_ranks.items()]
    errors.append(f"micro-batches {off([row for row in rows if not row.payload_bytes])}")
    link = cluster.links[0]
    return Table(
        title="The cost model, held against this machine",
        headers=("what", "ranks", "payload bytes", "measured us", "predicted us", "measured / predicted"),
        rows=tuple(
            (
                row.what,
                str(row.ranks),
                str(row.payload_bytes or "-"),
                f"{row.measured_us:.0f}",
                f"{row.predicted_us:.0f}",
                f"{row.ratio:.2f}" + (" (fitted)" if row.fitted else ""),
            )
            for row in rows
        ),
        numbers=frozenset({1, 2, 3, 4, 5}),
        note=f"fitted: {link.latency_us:.0f} us a message, {link.bandwidth_gb_s:.2f} GB/s, "
        f"{cluster.device.peak_tflops['float32'] * 1e3:.0f} GFLOP/s a rank; median error of {', '.join(errors)}",
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
