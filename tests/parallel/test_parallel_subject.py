"""The whole subject against the dense reference: losses, logits, gradients, norms, parameters, activations.

Everything is merged outside of the ranks and compared in float64 to 1e-9 of the largest element; replicas must have
the same bits, which the merging checks.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from harness.outcome.blocks import localize
from harness.outcome.merging import Merged, merge
from parallel.communication.batch import deliver
from parallel.communication.mesh import Mesh
from parallel.layers.loss import counted
from parallel.registry import MODES
from parallel.subject import subject
from parallel.training.loop import set_up
from reference.case import Case
from reference.model.parameters import weights
from reference.training import subject as dense
from tests.parallel.ranks import CPU, MEGATRON, on_ranks


def _merged(case: Case) -> Merged:
    return merge(on_ranks(case.world_size, lambda rank: localize(subject(case, CPU))))


def _same(merged: Merged, truth: dict[str, Tensor], tolerance: float = 1e-9) -> None:
    assert merged.flaws == ()
    assert set(merged.tensors) == set(truth)
    for name, expected in truth.items():
        found = merged.tensors[name]
        assert found.shape == expected.shape, name
        assert found.dtype == expected.dtype, name
        error = (found.double() - expected.double()).abs().max()
        assert error <= tolerance * expected.double().abs().max().clamp(min=1e-3), (name, float(error))


@pytest.mark.parametrize(
    "words",
    [
        "mode=tp tp=2",
        "mode=tp tp=3 dp=2 heads=6 kv_heads=3 hidden=48 ffn=96 seq=12 batch=3 micro=3",
        "mode=tp tp=1 dp=3",
        "mode=tp tp=1",
        "mode=tp tp=4 kv_heads=4 positions=rope qk_norm=true clip=0.05 optimizer=adamw lr=0.01",
        "mode=tp tp=2 head=gather label_smoothing=0.1 recompute=selective delivery=flat attention_mask=false",
        "mode=tp tp=2 family=internlm2 packed=true vocab=264",
        "mode=tp-sp tp=2",
        "mode=tp-sp tp=3 dp=2 heads=6 kv_heads=3 hidden=48 ffn=96 seq=12 recompute=full clip=0.05",
        "mode=tp-sp tp=4 kv_heads=4 positions=rope qk_norm=true tied=false overlap=false",
        "mode=tp-sp tp=2 family=internlm2 vocab=264 packed=true fuse_mlp=true batch=3",
        "mode=tp-sp tp=2 family=llama vocab=264 recompute=full label_smoothing=0.1 cross_entropy=fused",
        "mode=tp-sp tp=2 family=opt vocab=264 head=gather",
    ],
)
def test_the_outcome_is_the_dense_outcome(words: str) -> None:
    case = Case.parse(words)
    _same(_merged(case), dense.subject(case, CPU))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("megatron", MEGATRON)
def test_low_precision_follows_the_dense_model_in_the_same_dtype(megatron: str, dtype: str) -> None:
    """Eight roundings of the dtype at a tensor's largest element; a missing sum over two ranks is off by about half."""
    case = Case.parse(f"mode={megatron} tp=2 layers=1 steps=1 dtype={dtype} lr=0.1")
    _same(_merged(case), dense.subject(case, CPU), 8 * torch.finfo(getattr(torch, dtype)).eps)


def test_the_outcome_holds_shards_where_the_case_splits_and_no_padding() -> None:
    case = Case.parse("mode=tp tp=4 kv_heads=4 layers=1 vocab=257")
    outcomes = on_ranks(4, lambda rank: subject(case, CPU))
    held = [[tuple(box.local.shape) for box in outcome["grad/embedding.tokens.weight"]] for outcome in outcomes]
    assert held == [[(128, 64)], [(128, 64)], [(1, 64)], []]
    logits = [[tuple(box.local.shape) for box in outcome["logits/0"]] for outcome in outcomes]
    assert logits == [[(2, 32, 128)] * 2, [(2, 32, 128)] * 2, [(2, 32, 1)] * 2, []]
    assert isinstance(outcomes[0]["grad/final_norm.weight"], Tensor)
    assert [box.local.shape[0] for box in outcomes[1]["param/layers.0.mlp.w1.weight"]] == [64]


def test_too_large_logits_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.parse("mode=tp tp=2 layers=1 steps=1")
    elements = case.dp * case.micro * case.tokens * case.vocab
    for limit, kept in ((elements, True), (elements - 1, False)):
        monkeypatch.setattr("parallel.training.step.LARGEST_LOGITS", limit)
        (first, _) = on_ranks(2, lambda rank: set(subject(case, CPU)))
        assert ("logits/0" in first) is kept


def test_a_mode_that_is_not_offered_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.parse("mode=tp tp=2")
    monkeypatch.setattr("parallel.subject.MODES", {"isp": MODES["isp"]})

    def program(rank: int) -> str:
        with pytest.raises(ValueError, match="mode=tp: is not offered here; legal: isp"):
            subject(case, CPU)
        return "raised"

    assert on_ranks(2, program) == ["raised", "raised"]


def _observed(case: Case) -> Merged:
    """Every module's output and the gradient in it, in micro-batch 0 of step 0, as boxes of the dense ones."""

    def program(rank: int) -> object:
        mesh, mode = Mesh.of(case), MODES[case.mode]
        state = set_up(case, mode, mesh, CPU)
        outputs: dict[str, Tensor] = {}
        for name, module in state.model.named_modules():
            module.register_forward_hook(lambda _m, _i, output, name=name: _keep(outputs, name, output))
        batch = state.parts.local(deliver(case, mesh, 0, 0, CPU))
        labels = mode.laid_out(batch.labels)
        losses = state.parts.loss(state.model(batch), labels)
        (losses * counted(labels, mode.laid_out(batch.loss_mask))).sum().backward()
        found: dict[str, object] = {}
        for name, output in outputs.items():
            assert output.grad is not None, name
            for kind, local in (("act", output.detach()), ("act_grad", output.grad)):
                boxes = subject.activations(case, rank, name, local)
                if boxes is not None:
                    found[f"{kind}/{name}"] = boxes
        return localize(found)

    return merge(on_ranks(case.world_size, program))


def _keep(outputs: dict[str, Tensor], name: str, output: Tensor) -> Tensor:
    output.retain_grad()
    outputs[name] = output
    return output


@pytest.mark.parametrize(
    "words",
    [
        "mode=tp tp=2 dp=3 qk_norm=true",
        "mode=tp-sp tp=4 kv_heads=4 qk_norm=true fuse_qkv=false",
        "mode=tp-sp tp=2 dp=3 family=internlm2 vocab=264 packed=true fuse_mlp=true",
        "mode=tp tp=2 family=llama vocab=264 head=gather",
    ],
)
def test_activations_and_their_gradients_are_the_dense_ones(words: str) -> None:
    case = Case.parse(words)
    _same(_observed(case), dense.activations(case, CPU))


def test_modules_without_a_dense_counterpart_are_not_comparable() -> None:
    case = Case.parse("mode=tp tp=2")
    for module in ("", "embedding.tokens", "layers", "layers.0.attention.core"):
        assert subject.activations(case, 0, module, torch.zeros(2, 2, 2)) is None


def test_parallelism_happened() -> None:
    """Every rank holds less than the whole model: all linears and the vocabulary are split."""
    case = Case.parse("mode=tp tp=4 kv_heads=4")

    def program(rank: int) -> tuple[int, set[str]]:
        model: nn.Module = set_up(case, MODES["tp"], Mesh.of(case), CPU).model
        return sum(p.numel() for p in model.parameters()), {name for name, _ in model.named_parameters()}

    whole = sum(value.numel() for value in weights(case, CPU).values())
    for elements, names in on_ranks(4, program):
        assert elements < whole / 2
        assert names == set(weights(case, CPU))
