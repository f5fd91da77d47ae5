"""Tests of reference/checkpoints/foreign. Checkpoints of Megatron-Core's dist_checkpointing: the dense model gives
its logits, ranks train from them.
"""

import io
import pickle
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save as torch_save
from torch.nn.functional import gelu

from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.verdicts.verdict import FAIL
from shardproof.parallel.checkpoints.comparing import compare
from shardproof.parallel.checkpoints.state import CheckpointError
from shardproof.parallel.subject import subject
from shardproof.reference.case import Case
from shardproof.reference.data.batches import micro_batch
from shardproof.reference.model import decoder
from shardproof.reference.model.parameters import drawn_weight, shapes
from shardproof.suites.session.prover import Prover
from tests.parallel.ranks import numbers

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SIZES = (
    "layers=2 hidden=24 heads=4 ffn=40 vocab=96 seq=12 batch=2 micro=3 steps=1 tied=false dtype=float32 mode=tp-sp tp=2"
)
WORDS = f"{SIZES} kv_heads=2 positions=rope norm=rmsnorm activation=swiglu bias=false"
FORMS = {"llama": WORDS, "gpt": f"{SIZES} kv_heads=4 positions=learned norm=layernorm activation=gelu bias=true"}


def _saved(folder: Path, tokens: Tensor, form: str, patch: pytest.MonkeyPatch) -> Tensor:
    """Save a small GPTModel of Megatron-Core, and return its logits."""
    from megatron.core import dist_checkpointing, parallel_state  # noqa: PLC0415

    from shardproof.suites.subjects import mcore, mcore_training, megatron  # noqa: PLC0415

    def program(_: int) -> Any:
        model = mcore.build(SimpleNamespace(tp=1, sp=False, llama=form == "llama", dtype="float32", seed=3)).module
        dist_checkpointing.save(model.sharded_state_dict(), str(folder))
        mask = torch.ones(1, 1, 12, 12).triu(1).bool()
        logits = model(tokens, torch.arange(12).expand(2, 12), mask).detach()
        parallel_state.destroy_model_parallel()
        return logits

    fused = partial(gelu, approximate="tanh")  # as Megatron-LM's is
    patch.setitem(mcore_training.PLAIN, "activation_func", fused)
    with InprocEngine() as engine, megatron.session():
        (logits,) = engine.run(program, world_size=1)
    assert isinstance(logits, Tensor)
    return logits


@pytest.fixture
def core() -> None:
    pytest.importorskip("megatron.core", reason="megatron-core (extra `peers`) is not installed")


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.deep("Megatron-Core saves in processes of its own")
@pytest.mark.usefixtures("core")
@pytest.mark.parametrize("form", FORMS)
def test_weights_of_megatron_core_give_its_logits_and_train_in_parallel(
    prover: Prover, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    case = Case.parse(f"{FORMS[form]} load={tmp_path}")
    batch = replace(
        micro_batch(case.but(load=""), 0, 0, 0, device=torch.device("cpu")), positions=torch.arange(12).expand(2, 12)
    )
    theirs = _saved(tmp_path, batch.tokens, form, monkeypatch)
    ours = decoder.logits(case, {name: drawn_weight(case, name) for name in shapes(case)}, batch)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)  # float32
    assert not [one.message for one in prover.proof(case, subject).verdicts if one.verdict == FAIL]


def _written(folder: Path, held: dict[str, Tensor], *, numbered: bool, fused_norms: bool) -> None:
    """Write as dist_checkpointing writes a model of two layers, 6 tokens padded to 8: by hand, from its source."""
    norm = "self_attention.linear_qkv.layer_norm_weight" if fused_norms else "input_layernorm.weight"
    names = {"attention_norm": norm, "attention.wqkv": "self_attention.linear_qkv.weight"}
    names |= {"attention.wo": "self_attention.linear_proj.weight", "mlp.w13": "mlp.linear_fc1.weight"}
    names["mlp.w2"] = "mlp.linear_fc2.weight"
    table = held["embedding.tokens.weight"]
    state: dict[str, Any] = {"embedding.word_embeddings.weight": torch.cat([table, torch.zeros(2, 8)])}
    for ours, theirs in names.items():
        layers = [held[f"layers.{number}.{ours}.weight"] for number in range(2)]
        if numbered:
            state |= {f"decoder.layers.{number}.{theirs}": layer for number, layer in enumerate(layers)}
        else:
            state[f"decoder.layers.{theirs}"] = torch.stack(layers)
    state["decoder.layers.mlp.linear_fc1._extra_state/shard_0_2"] = io.BytesIO(b"what a module keeps")
    state["optimizer.state.exp_avg.decoder.final_layernorm.weight"] = torch.zeros(8)
    torch_save(state, checkpoint_id=folder, no_dist=True)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')


@pytest.mark.parametrize("numbered, fused_norms", [(False, False), (True, True)])
def test_what_is_written_in_its_form_is_read(tmp_path: Path, numbered: bool, fused_norms: bool) -> None:
    ours, theirs, spoiled = (tmp_path / name for name in ("ours", "theirs", "spoiled"))
    held = {"embedding.tokens.weight": numbers(6, 8, seed=9)}
    for number in range(2):
        layer = {"attention_norm": (8,), "attention.wqkv": (16, 8), "attention.wo": (8, 8)}
        layer |= {"mlp.w13": (10, 8), "mlp.w2": (8, 5)}
        held |= {f"layers.{number}.{name}.weight": numbers(*shape, seed=number) for name, shape in layer.items()}
    torch_save({f"model.{name}": tensor for name, tensor in held.items()}, checkpoint_id=ours, no_dist=True)
    _written(theirs, held, numbered=numbered, fused_norms=fused_norms)
    assert compare(str(ours), str(theirs)).first is None
    changed = held | {"layers.1.mlp.w2.weight": numbers(8, 5, seed=7)}
    _written(tmp_path / "changed", changed, numbered=numbered, fused_norms=fused_norms)
    found = compare(str(ours), str(tmp_path / "changed"))
    assert found.first is not None and found.first.key == "model.layers.1.mlp.w2.weight" and not found.others
    hole = held["layers.1.mlp.w2.weight"].clone()
    hole[0, 0] = torch.nan
    _written(spoiled, held | {"layers.1.mlp.w2.weight": hole}, numbered=numbered, fused_norms=fused_norms)
    with pytest.raises(CheckpointError, match=r"linear_fc2.weight, of which elements are missing or are no numbers"):
        compare(str(ours), str(spoiled))
    file = theirs / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.state_dict_metadata["embedding.word_embeddings.weight"].chunks.pop()
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"embedding.word_embeddings.weight, of which elements are missing"):
        compare(str(ours), str(theirs))
