"""What the table of a prediction says: of which step it is, why a candidate is not the first, several cases in one."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from harness.engines.shapes.dry import DryEngine
from harness.predicting.clusters import PRESETS
from parallel.subject import subject
from reports.commands.cli import main
from reports.predicting.prediction import predict

CLUSTER = PRESETS["8xH100-NVLink-IB400"]
TINY = "family=llama hidden=32 heads=4 kv_heads=2 ffn=32 vocab=64 seq=8 dtype=bfloat16"


def test_the_table_says_of_which_step_it_is_and_what_fsdp_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", f"{TINY} tp=2 dp=3 layers=1 mode=fsp batch=3 micro=5", "--cluster", "laptop"]) == 0
    told = capsys.readouterr().out
    assert f"a step: seq=8 batch=3 micro=5 on every data rank, {8 * 3 * 5 * 3} tokens on all" in told
    assert "FSDP (ZeRO-3, FSDP2) is zero=3" in told


def test_why_a_runner_up_lost_adds_up_to_what_it_is_slower() -> None:
    with DryEngine() as engine:
        told = predict(f"{TINY} tp=2 layers=1 seq=64 batch=4", subject, CLUSTER, engine)
    first, *others = told.rows.to_dict("records")
    assert first["lost"] == ""
    slower = [row for row in others if row["lost"] != "as fast"]
    assert slower
    for row in slower:
        total, _, parts = row["lost"].partition(" slower: ")
        by = first["tokens_per_s_per_rank"] / row["tokens_per_s_per_rank"] - 1
        assert float(total.rstrip("%")) == pytest.approx(100 * by, abs=0.051)
        shares = [float(part.rpartition(" ")[2].rstrip("%")) for part in parts.split(", ")]
        assert sum(shares) == pytest.approx(100 * by, abs=1.2), "parts below half a per cent are left out"
        exposed = [one["exposed_s"] / one["step_s"] / one["tokens_per_s_per_rank"] for one in (row, first)]
        if "waiting for calls" in parts:
            told_by = float(parts.partition("waiting for calls ")[2].partition("%")[0])
            assert told_by == pytest.approx(100 * (exposed[0] - exposed[1]) * first["tokens_per_s_per_rank"], abs=0.051)


def test_what_does_not_fit_says_by_how_much_and_what_fills_the_memory() -> None:
    small = replace(CLUSTER, device=replace(CLUSTER.device, memory_gib=2**-16))
    with DryEngine() as engine:
        told = predict(f"{TINY} tp=2 layers=1", subject, small, engine)
    for row in told.rows.iloc[1:].to_dict("records"):
        more = row["peak_bytes"] / 2**30 - 2**-16
        parts = {name: row[f"{name}_bytes"] for name in ("parameters", "gradients", "optimizer", "saved")}
        most = max(parts, key=parts.__getitem__)
        if row["legal"] == "yes":
            assert row["lost"] == f"{more:.3g} GiB too many; {most} {parts[most] / 2**30:.3g} GiB"


def test_several_cases_are_one_table_the_fastest_first(capsys: pytest.CaptureFixture[str]) -> None:
    texts = [f"{TINY} mode={mode} layers=1 tp={tp}" for mode in ("fsp", "tp") for tp in (2, 1)]
    assert main(["predict", *texts, "--cluster", "laptop"]) == 0
    told = capsys.readouterr().out
    assert told.count("tokens/s/GPU") == told.count("Memory of a GPU") == told.count("fastest that fits") == 1
    table = told[told.index("tokens/s/GPU") :].split("\n\n", maxsplit=1)[0]
    rows = [line for line in table.splitlines()[2:] if line.startswith(("tp=", "mode="))]
    assert len(rows) == 4
    assert main(["predict", *texts, "--cluster", "laptop", "--json"]) == 0
    speeds = [one["candidates"][0]["tokens_per_s_per_rank"] for one in json.loads(capsys.readouterr().out)]
    shown = [float(line.split("yes")[1].split()[0].replace(",", "")) for line in rows]
    assert shown == pytest.approx(sorted(speeds, reverse=True), rel=1e-3)
