"""Costs: a fitted line, the benchmark workload, medians over rounds, and pairs of recorded steps."""

import csv
import json
from collections import Counter
from pathlib import Path

import pytest

from bench import cost_table, proof_costs
from bench.cost_table import CALLS, Asked, fitted, held_against, main, measured, written
from bench.witnesses import STEPS, WITNESSES, cost_of
from bench.workload import Sizes, data, dense, largest_error, rank_program, weights
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.errors import MachineError
from shardproof.harness.ledger import Call
from shardproof.harness.predicting.clusters import read
from shardproof.harness.predicting.costs import route, seconds
from tests.forked import started

TINY = Asked(
    worlds=(2,),
    payloads=(64, 4096),
    modes=("tp", "isp"),
    step="mode={mode} tp=2 layers=1 hidden=16 heads=4 kv_heads=4 ffn=16 seq=8 batch=1 micro=1 dtype=float32",
    rounds=2,
)


def test_a_line_is_fitted_as_it_was_drawn_and_times_that_are_no_line_upwards_are_refused(tmp_path: Path) -> None:
    cluster = fitted((4096, 2 * 30 + 4096 / 500), (4 << 20, 2 * 30 + (4 << 20) / 500), 5e9)
    (link,) = cluster.links
    assert (link.latency_us, link.bandwidth_gb_s) == pytest.approx((30, 0.5))
    assert seconds("all_reduce", 1 << 20, route((0, 1), cluster)) == pytest.approx(60e-6 + (1 << 20) / 0.5e9)
    file = tmp_path / "mine.toml"
    file.write_text(written(cluster))
    assert read(str(file)) == cluster
    for large_us in (10.0, 100000.0):
        with pytest.raises(MachineError, match="no latency and bandwidth fit that; repeat on a quieter machine"):
            fitted((4096, 50.0), (8192, large_us), 5e9)


def test_what_the_line_was_made_from_agrees_and_the_rest_is_predicted() -> None:
    times = {("all_reduce", 2, 64): 21.0, ("all_reduce", 2, 4096): 84.0, ("all_gather", 2, 4096): 104.0}
    times["tp", 2, 0] = 9.0
    cluster = fitted((64, 21.0), (4096, 84.0), 5e9)
    rows = {(row.what, row.payload_bytes): row for row in held_against(times, cluster, TINY)}
    assert [row.ratio for row in rows.values() if row.fitted] == pytest.approx([1.0, 1.0])
    gather = rows["all_gather", 4096]
    assert not gather.fitted
    assert gather.predicted_us == pytest.approx(10 + 2048 / 64)
    assert rows["micro-batch, tp", 0].predicted_us > 0
    halves = [gather._replace(measured_us=us, predicted_us=10.0) for us in (5.0, 20.0)]
    note = cost_table.table(halves, cluster).note
    assert "calls of 2 ranks 2.00x" in note, "the error is the same for half and for twice"


def test_every_call_and_step_is_timed() -> None:
    with InprocEngine() as engine:
        times, flops_per_s = measured(engine, TINY)
    assert set(times) == {(op, 2, size) for op in CALLS for size in TINY.payloads} | {("tp", 2, 0), ("isp", 2, 0)}
    assert min(times.values()) > 0 and flops_per_s > 0


def test_the_command_writes_both_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = {("all_reduce", 2, size): 20 + size / 1e3 for size in cost_table.PAYLOADS} | {("tp-sp", 2, 0): 1e4}
    monkeypatch.setattr(cost_table, "measured", lambda engine, asked: (times, 5e9))
    assert main(["--out", str(tmp_path)]) == 0
    assert "10 us a message, 1.00 GB/s, 5 GFLOP/s a rank" in " ".join(capsys.readouterr().out.split())
    assert read(str(tmp_path / "cluster.toml")).links[0].latency_us == pytest.approx(10)
    with (tmp_path / "costs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["fitted"] for row in rows] == ["True", "False", "False", "True", "False"]

    monkeypatch.setattr(cost_table, "measured", lambda engine, asked: (dict.fromkeys(times, 7.0), 5e9))
    assert main(["--out", str(tmp_path)]) == 3
    assert "repeat on a quieter machine" in capsys.readouterr().err


SIZES = Sizes(layers=2, hidden=16, heads=4, seq=5, batch=3, ffn=32)


class Counts:
    """How often each op was issued, and the payloads."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, int]] = Counter()

    def issued(self, rank: int, call: Call) -> int:
        self.calls[call.op, call.payload_bytes] += 1
        return 0

    def completed(self, rank: int, ticket: int) -> None:
        """Nothing to count."""


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ranks_equal_the_dense_model(world_size: int) -> None:
    full, (x, dy), counts = weights(SIZES), data(SIZES), Counts()
    assert len(full) == 24
    with InprocEngine() as engine:
        passed = engine.run(rank_program, world_size, SIZES, full, x, dy, world_size=world_size, observer=counts)
    assert largest_error(passed, dense(SIZES, full, x, dy)) < 1e-12
    assert counts.calls == {("all_reduce", 3 * 5 * 16 * 8): 8 * world_size}
    passed = [rank_program(rank, 2, SIZES, full, x, dy, comm=False) for rank in range(2)]
    assert largest_error(passed, dense(SIZES, full, x, dy)) > 1e-3, "the floor, which runs without communication"


OFF = [(2.0, 1.0), (4.0, 2.0)]
"""Seconds by the clock and of CPU, one pair a round."""


@pytest.mark.parametrize("witness", WITNESSES)
def test_costs_are_medians_of_the_rounds_own_ratios_on_the_slower_rank(witness: str) -> None:
    ranks = [{"off": OFF, witness: [(3.0, 4.0), (9.0, 3.0)]}, {"off": OFF, witness: [(5.0, 1.0), (4.0, 1.0)]}]
    cost = cost_of(ranks, witness, events=10)
    # Slower rank by round: clock 5 and 9, CPU 4 and 3; unwatched 2 and 4, CPU 1 and 2.
    assert (cost.by_clock, cost.by_cpu) == ((5 / 2 + 9 / 4) / 2, (4 / 1 + 3 / 2) / 2)
    # What is added in STEPS steps, over 10 events a step.
    assert (cost.clock_us, cost.cpu_us) == (4e6 / STEPS / 10, 2e6 / STEPS / 10)
    assert cost.seconds == (5 + 9) / 2 / STEPS


def paired() -> None:
    """Print the seconds of three pairs of steps of a tiny program."""
    proof_costs.LAYERS, proof_costs.HIDDEN, proof_costs.HEADS, proof_costs.VOCAB, proof_costs.SEQ = 1, 8, 2, 11, 4
    proof_costs.main(3)


def test_pairs_of_steps_are_timed_and_their_calls_recorded(tmp_path: Path) -> None:
    process = started(paired, folder=tmp_path)
    assert process.ended(120.0) == 0, process.err
    seconds = json.loads(process.out)
    assert [len(seconds[name]) for name in ("off", "on")] == [3, 3]
    assert min(seconds["on"]) > 0
