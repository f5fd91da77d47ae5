"""Table of a prediction, and suggested layouts: legal, on the same tokens, near their forecasts."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType

import pytest

from shardproof.bugs.planting import planted_module, replaced
from shardproof.harness.engines.shapes.dry import DryEngine
from shardproof.harness.errors import RequestError
from shardproof.harness.predicting.clusters import Cluster, Device, Link
from shardproof.harness.predicting.figures import Forecast
from shardproof.harness.predicting.forecast import forecast
from shardproof.parallel.subject import subject
from shardproof.reports.commands.cli import main
from shardproof.reports.predicting import suggesting
from shardproof.reports.predicting.planning import Candidate
from shardproof.reports.predicting.prediction import predict
from tests.harness.predicting.test_predict import CLUSTER, TINY


def test_why_a_runner_up_lost_adds_up_to_what_it_is_slower(dry: DryEngine) -> None:
    told = predict(f"{TINY} tp=2 layers=1 seq=64 batch=4", subject, CLUSTER, dry)
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


def test_what_does_not_fit_says_by_how_much_and_what_fills_the_memory(dry: DryEngine) -> None:
    small = replace(CLUSTER, device=replace(CLUSTER.device, memory_gib=2**-16))
    told = predict(f"{TINY} tp=2 layers=1", subject, small, dry)
    for row in told.rows.iloc[1:].to_dict("records"):
        more = row["peak_bytes"] / 2**30 - 2**-16
        parts = {name: row[f"{name}_bytes"] for name in ("parameters", "gradients", "optimizer", "saved")}
        most = max(parts, key=parts.__getitem__)
        if row["legal"] == "yes":
            assert row["lost"] == f"{more:.3g} GiB too many; {most} {parts[most] / 2**30:.3g} GiB"


def test_several_cases_are_one_table_the_fastest_first(capsys: pytest.CaptureFixture[str]) -> None:
    """The table says of which step it is, and what FSDP is called."""
    texts = [f"{TINY} mode={mode} layers=1 tp={tp} dp=3 batch=3 micro=5" for mode in ("fsp", "tp") for tp in (2, 1)]
    assert main(["predict", *texts, "--cluster", "laptop"]) == 0
    told = capsys.readouterr().out
    assert f"a step: seq=8 batch=3 micro=5 on every data rank, {8 * 3 * 5 * 3} tokens on all" in told
    assert "FSDP (ZeRO-3, FSDP2) is zero=3" in told
    assert told.count("tokens/s/GPU") == told.count("Memory of a GPU") == told.count("fastest that fits") == 1
    table = told[told.index("tokens/s/GPU") :].split("\n\n", maxsplit=1)[0]
    rows = [line for line in table.splitlines()[2:] if line.startswith(("tp=", "mode="))]
    assert len(rows) == 4
    assert main(["predict", *texts, "--cluster", "laptop", "--json"]) == 0
    speeds = [one["candidates"][0]["tokens_per_s_per_rank"] for one in json.loads(capsys.readouterr().out)]
    shown = [float(line.split("yes")[1].split()[0].replace(",", "")) for line in rows]
    assert shown == pytest.approx(sorted(speeds, reverse=True), rel=1e-3)


WORDS = "family=llama hidden=512 heads=8 kv_heads=4 ffn=1536 vocab=1024 layers=8 seq=256 batch=2 dtype=bfloat16"
DEEP = f"{WORDS} mode=tp-sp tp=2".replace("layers=8", "layers=12")
LINKS = (Link(name="l", ranks=0, latency_us=0.01, bandwidth_gb_s=20),)


def cluster(gib: float) -> Cluster:
    return Cluster(
        name="c", device=Device(name="d", memory_gib=gib, peak_tflops={"bfloat16": 10}), links=LINKS, algorithm="ring"
    )


LAYOUTS = (
    "pp=4 dp=1 zero=0 recompute=none micro=16 first_layers=2 last_layers=2",
    "pp=2 dp=2 zero=1 recompute=none micro=8",
    "pp=2 dp=2 zero=2 recompute=full micro=8 no_sync=true",
    "pp=2 dp=2 zero=3 recompute=none micro=8 no_sync=true",
    "pp=1 dp=4 zero=0 recompute=full micro=4",
    "pp=1 dp=4 zero=3 recompute=full micro=4",
    "pp=1 dp=4 zero=2 recompute=selective micro=4",
)
"""Layouts that are forecast too, on eight ranks."""
PLANTED = {
    "one micro-batch in flight": ("min(pp - place, micro)", "1"),
    "states of the whole model on a stage": (
        "parameters = model.parameters.layer * layers",
        "parameters = model.parameters.layer * layers * pp",
    ),
    "optimizer not split": ("(ranks if zero >= 1 else 1)", "1"),
    "no bubble": ("(micro - 1) * max(stages_s) + sum(stages_s)", "micro * max(stages_s)"),
    "even stages": ("return [first or even,", "return [layers // pp] * pp if first else [first or even,"),
    "gathers of a stage's zero=3 once a step": ("else 1 + micro) * gather_s", "else 1) * gather_s"),
    "gradients of stages split": ("summed_once = pp > 1", "summed_once = False"),
}
"""Mistake -> text of the source and what it becomes."""


Measure = Callable[[Candidate], Forecast]


@pytest.fixture(scope="module")
def measure() -> Iterator[Measure]:
    """A forecast of each case, made once."""
    known: dict[str, Forecast] = {}
    with DryEngine() as engine:

        def made(one: Candidate) -> Forecast:
            assert one.case is not None
            key = str(one.case)
            if key not in known:
                known[key] = forecast(one.case, subject, cluster(1.0), engine, states=one.states)
            return known[key]

        yield made


def far(module: ModuleType, measure: Measure) -> list[str]:
    """The layouts whose memory this module estimates 6 % off the forecast or more, or whose speed 3 %."""
    found = {one.candidate.words: one for one in module.estimates(DEEP, subject, cluster(1.0), 8, measure)}
    wrong = []
    for layout in LAYOUTS:
        one = found[f"mode=tp-sp tp=2 cp=1 {layout}"]
        told = measure(one.candidate)
        ratios = one.peak_bytes / told.memory.peak, one.tokens_per_s_per_rank / told.tokens_per_s_per_rank
        wrong += [
            f"{layout}: {r}" for r, off in zip(ratios, (0.06, 0.03), strict=True) if r != pytest.approx(1, abs=off)
        ]
    return wrong


def test_every_layout_is_legal_on_the_same_tokens_and_near_its_forecast(measure: Measure) -> None:
    found = suggesting.estimates(DEEP, subject, cluster(1.0), 8, measure)
    layouts = [one.candidate.words for one in found]
    assert len(set(layouts)) == len(layouts) == 30  # recompute: 3 of pp=1 and pp=2 with zero=0..3, pp=4 even and uneven
    for one in found:
        case = one.candidate.case
        assert case is not None and case.world_size == 8
        assert len(case.axes["dp"][0]) * case.micro == 16  # two micro-batches for each of eight ranks
    assert far(suggesting, measure) == []


def test_other_modes_are_tried_where_the_best_layout_without_stages_lies(measure: Measure) -> None:
    (known,) = (
        one.candidate
        for one in suggesting.estimates(f"{DEEP} zero=0 recompute=none", subject, cluster(1.0), 2, measure)
    )
    text = DEEP.replace("mode=tp-sp ", "")
    found = suggesting.estimates(text, subject, cluster(1.0), 8, lambda _: measure(known))
    tried = {tuple(one.candidate.words.split()) for one in found if "mode=tp-sp" not in one.candidate.words}
    assert {words[0] for words in tried} == {f"mode={mode}" for mode in ("mtp", "msp", "fsp", "isp", "autotp")}
    assert all({"tp=2", "pp=1"} <= {*words} for words in tried)
    assert {words[-1] for words in tried if "mode=isp" in words} == {"wp=8"}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_mistake_in_an_estimate_is_far_from_a_forecast(mistake: str, measure: Measure) -> None:
    name = suggesting.__name__
    assert far(planted_module(replaced(name, *PLANTED[mistake]), name), measure)


def test_the_answer_fits_and_needs_a_number_of_ranks(dry: DryEngine) -> None:
    told = predict(f"{WORDS} mode=tp-sp tp=2 recompute=none", subject, cluster(1.0), dry, world=4, suggest=True)
    assert len(told.rows) == 3 and told.fastest.startswith("fastest that fits into the 1 GiB of a d: mode=tp-sp tp=2 ")
    assert set(told.rows["ledger"]) == {"equal"} and set(told.rows["ranks"]) == {4}
    with pytest.raises(RequestError, match="suggest: needs .*; legal: --suggest --world 64"):
        predict(WORDS, subject, cluster(1.0), dry, suggest=True)
    for words, rule in (("tp=16", "heads=8: must be a multiple of tp=16"), ("micro=x", "micro=x: must be a")):
        with pytest.raises(RequestError, match=rule):  # no layout can be that
            predict(f"{WORDS} {words}", subject, cluster(1.0), dry, world=16, suggest=True)
