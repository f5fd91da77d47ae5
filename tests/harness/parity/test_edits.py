"""Mistakes planted in a real training script, launched as users do: each is found, at its first place.

The untouched script passes in every layout and on several seeds.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from shardproof.harness.parity.judging import Further, judge_launches
from shardproof.harness.parity.launching import LaunchRecorder
from shardproof.harness.parity.recorded import Launch
from shardproof.harness.programs.session import ValueOptions
from shardproof.harness.running.result import CaseResult

SCRIPT = Path(__file__).with_name("train_gpt.py")
LIMIT_S = 240.0
EDITS: Mapping[str, tuple[str, str, str, str]] = {
    "sampler_seed": ("ddp", "data", "sample/0", "a seed of its own"),
    "missing_average": ("ddp", "grad_sync", "grad/head.weight", "never averaged over dp"),
    "loss_count": ("ddp", "loss", "loss/0", "is 1 / the size of dp"),
    "norm_sum": ("tp", "grad_sync", "grad/head.weight", ""),
    "wrong_slice": ("tp", "forward", "loss/0", "shifted by 1 of 2 shards (tp)"),
    "clip_early": ("ddp", "grad_sync", "grad/head.weight", "never averaged over dp"),
    "stale_gradient": ("ddp", "grad_sync", "grad/head.weight", "they hold the gradients of step 0 too"),
    "factor_not_summed": ("tp", "backward", "grad/head.weight", ""),
    "same_batch": ("ddp", "data", "sample/0", "read the same batch, as if they were one data rank"),
    "seed_by_rank": ("ddp", "forward", "init/tokens.weight", "on rank 1 alone"),
}
"""Edit -> the layout that shows it, the phase and the name of its first place, and words of its cause."""


class Launches:
    """Launches of the script, each recorded once."""

    def __init__(self, folder: Path, dtype: str, *words: str) -> None:
        values = ValueOptions(dtype=dtype)
        self._recorder = LaunchRecorder(folder=folder, steps=2, timeout_s=LIMIT_S, values=values)
        self._words = words
        self._known: dict[str, Launch] = {}

    def alone(self, name: str = "first", **options: int) -> Launch:
        command = [sys.executable, str(SCRIPT), *self._words]
        return self._known.get(name) or self._known.setdefault(name, self._recorder.record(name, command, **options))

    def judged(self, mode: str, *words: str) -> CaseResult:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [*torchrun, str(SCRIPT), "--mode", mode, *self._words, *words]
        second = self._recorder.record("-".join([mode, *words]).replace("--", ""), command)
        further = Further(
            again=lambda: self.alone("again"), perturbed=lambda seed: self.alone(f"perturbed-{seed}", perturb=seed)
        )
        return judge_launches(self.alone(), second, further=further)


@pytest.mark.deep("ten launches of two ranks: a minute")
def test_every_mistake_is_found_at_its_first_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    launches = Launches(tmp_path, "float64")
    for edit, (mode, phase, name, cause) in EDITS.items():
        result = launches.judged(mode, "--edit", edit)
        failed = [one.failure for one in result.verdicts if one.failure is not None]
        assert {(one.first.phase, one.first.name) for one in failed} == {(phase, name)}, edit
        assert all(cause in "; ".join(told.fact.text for told in one.causes) for one in failed), edit


@pytest.mark.deep("35 launches: three minutes")
@pytest.mark.parametrize("dtype", ["float64", ""])
def test_the_untouched_script_passes(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for seed in range(5):
        launches = Launches(tmp_path / str(seed), dtype, "--seed", str(seed))
        modes = ("ddp", "tp", "dtensor", "fsdp2", "pp") if seed == 0 else ("ddp", "tp")
        for mode in modes:
            result = launches.judged(mode)
            assert {one.check: one.statement for one in result.verdicts if one.verdict != "pass"} == {}, mode


@pytest.mark.deep("three launches")
def test_what_is_drawn_or_dead_does_not_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    launches = Launches(tmp_path, "float64")
    for edit, check, verdict, words in (
        ("frozen", "alive", "fail", "no parameter moves"),
        ("detached", "alive", "fail", "no gradient reaches a parameter"),
        ("dropout", "forward", "unknown", "numbers are drawn in"),
    ):
        result = launches.judged("ddp", "--edit", edit)
        found = {one.check: one for one in result.verdicts}
        assert found[check].verdict == verdict and words in found[check].statement, edit
