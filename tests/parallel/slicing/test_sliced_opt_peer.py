"""OPT sliced over 2, 3 and 4 ranks computes the logits and the loss of Hugging Face's OPTForCausalLM, in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from harness.engines.named import engine_named
from harness.running.proof import prove
from reference.case import Case
from reference.data.batches import micro_batch
from reference.model.parameters import weights
from tests.reference.model.dense_run import CPU, ignored_labels
from tests.reference.model.double_torch import DoubleTorch
from tests.reference.model.hugging_face import ALLOWED
from tests.reference.model.test_dense_opt import hugging_face, modeling_opt, renamed

pytestmark = pytest.mark.peers
SHAPE = (
    "mode=autotp family=opt hidden=40 heads=10 ffn=37 vocab=67 layers=2 fuse_qkv=false seq=6 batch=3 micro=1 steps=1"
)


@pytest.mark.parametrize(("tp", "head"), [(2, "gather"), (3, "sum"), (4, "sum")])
def test_sliced_opt_equals_hugging_face_opt(tp: int, head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_opt, "torch", DoubleTorch())
    case = Case.parse(f"{SHAPE} tp={tp} head={head}")
    model = hugging_face(case)
    model.load_state_dict(renamed(case, weights(case, CPU)), strict=False)
    batch = micro_batch(case, 0, 0, 0)
    with torch.no_grad():
        logits = model(batch.tokens).logits
    loss = functional.cross_entropy(logits.flatten(0, 1), ignored_labels(batch).flatten())

    with engine_named("inproc") as engine:
        result = prove(case, "parallel.subject:subject", engine)
    assert result.evidence is not None
    found = result.evidence.merged.tensors
    assert float((found["logits/0"] - logits).abs().max()) < ALLOWED
    assert abs(float(found["loss/0"]) - float(loss)) < ALLOWED
