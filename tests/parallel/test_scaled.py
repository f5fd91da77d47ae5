"""Dynamic loss scaling: its rule, its one call a step, and steps that every rank skips together."""

from __future__ import annotations

import pytest
import torch

from harness.checking.evidence import FAIL, UNKNOWN
from harness.engines.threads.inproc import InprocEngine
from harness.running.proof import prove
from parallel import scaled
from parallel.scaled import FIRST_SCALE, HYSTERESIS, Scale, subject
from reference.case import Case

TINY = (
    "preset=gpt3-857m mode=tp tp=2 dtype=float16 layers=1 hidden=32 heads=4 kv_heads=4 ffn=64 vocab=509 seq=16 micro=1"
)


def test_the_scale_of_the_seed_after_twenty_skipped_steps() -> None:
    scale = Scale()
    for _ in range(20):
        scale.update(infinite=True)
    scale.update(infinite=False)
    assert (FIRST_SCALE, HYSTERESIS) == (2.0**32, 2)
    assert (scale.value, scale.skipped) == (8192.0, 20)


def test_one_call_a_step_is_added_and_the_rest_is_the_plain_subjects() -> None:
    case = Case.parse(f"{TINY} steps=3")
    with InprocEngine() as engine:
        result = prove(case, subject, engine)
    verdicts = {verdict.check: verdict.verdict for verdict in result.verdicts}
    assert not {FAIL, UNKNOWN} & set(verdicts.values()), [v.message for v in result.verdicts]
    assert {"ledger", "forward", "replicas", "recording"} <= set(verdicts)
    assert result.evidence is not None
    found = [event for event in result.events if event.phase == "step"]
    assert [(e.op, e.reduce_op, e.payload_bytes, e.step) for e in found if e.rank == 0] == [
        ("all_reduce", "max", 4, step) for step in range(3)
    ]


def test_an_infinite_gradient_of_one_rank_is_skipped_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Scale] = []

    def scaled_by(values: tuple[float, float]) -> list[int]:
        """Skipped steps by rank when the ranks scale their losses by these."""
        made.clear()

        def scale() -> Scale:
            made.append(Scale(value=values[torch.distributed.get_rank()], patience=9))
            return made[-1]

        monkeypatch.setattr(scaled, "Scale", scale)
        case = Case.parse(f"{TINY} steps=2".replace("float16", "float64"))
        with InprocEngine() as engine:
            engine.run(lambda _rank: subject(case, torch.device("cpu")), world_size=2)
        return [one.skipped for one in made]

    assert scaled_by((1.0, 1.0)) == [0, 0]
    assert scaled_by((1.0, float("inf"))) == [2, 2]


def test_data_ranks_are_refused_with_the_reason() -> None:
    assert "legal: dp=1" in subject.refuses(Case.parse(f"{TINY} dp=2"))
