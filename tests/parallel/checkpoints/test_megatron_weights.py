"""A checkpoint of Megatron-Core's dist_checkpointing: the dense model gives its logits, and ranks train from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor

from harness.checking.evidence import FAIL
from harness.engines.threads.inproc import InprocEngine
from parallel.subject import subject
from reference.case import Case
from reference.data.batches import micro_batch
from reference.model import decoder
from reference.model.parameters import drawn, shapes
from suites.session.prover import Prover

pytestmark = [pytest.mark.peers, pytest.mark.slow]
WORDS = (
    "layers=2 hidden=24 heads=4 kv_heads=2 ffn=40 vocab=96 seq=12 batch=2 micro=3 steps=1 positions=rope norm=rmsnorm "
    "activation=swiglu bias=false tied=false dtype=float32 mode=tp-sp tp=2"
)


def _saved(folder: Path, tokens: Tensor) -> Tensor:
    """Save a small GPTModel of Megatron-Core, and return its logits."""
    from megatron.core import dist_checkpointing, parallel_state  # noqa: PLC0415
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: PLC0415

    from suites.subjects import mcore, megatron  # noqa: PLC0415

    def program(_: int) -> Any:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
        model_parallel_cuda_manual_seed(1)
        model = mcore.build(SimpleNamespace(tp=1, sp=False, llama=True, dtype="float32", seed=3)).module
        dist_checkpointing.save(model.sharded_state_dict(), str(folder))
        mask = torch.ones(1, 1, 12, 12).triu(1).bool()
        return model(tokens, torch.arange(12).expand(2, 12), mask).detach()

    with InprocEngine() as engine, megatron.session():
        (logits,) = engine.run(program, world_size=1)
    assert isinstance(logits, Tensor)
    return logits


def test_weights_of_megatron_core_give_its_logits_and_train_in_parallel(prover: Prover, tmp_path: Path) -> None:
    if settings().max_examples <= 100:
        pytest.skip("Megatron-Core saves in processes of its own: in the deep profile")
    pytest.importorskip("megatron.core", reason="megatron-core (extra `peers`) is not installed")
    case = Case.parse(f"{WORDS} load={tmp_path}")
    batch = replace(
        micro_batch(case.but(load=""), 0, 0, 0, device=torch.device("cpu")), positions=torch.arange(12).expand(2, 12)
    )
    theirs = _saved(tmp_path, batch.tokens)
    ours = decoder.logits(case, {name: drawn(case, name) for name in shapes(case)}, batch)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)  # float32
    assert not [one.message for one in prover.proof(case, subject).verdicts if one.verdict == FAIL]
