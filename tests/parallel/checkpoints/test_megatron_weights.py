"""Checkpoints of Megatron-Core's dist_checkpointing are read, trained from and written as it reads them."""

from __future__ import annotations

import io
import pickle
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save as torch_save
from torch.nn.functional import gelu

from harness.checking.evidence import FAIL
from harness.engines.threads.inproc import InprocEngine
from parallel.checkpoints.comparing import compare, export
from parallel.checkpoints.errors import CheckpointError
from parallel.subject import subject
from reference.case import Case
from reference.checkpoints import torch_format
from reference.checkpoints.whole import tensors
from reference.data.batches import micro_batch
from reference.model import decoder
from reference.model.parameters import drawn, shapes
from suites.session.prover import Prover
from tests.parallel.checkpoints.megatron_ranks import saved
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
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: PLC0415

    from suites.subjects import mcore, megatron  # noqa: PLC0415

    def program(_: int) -> Any:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
        model_parallel_cuda_manual_seed(1)
        model = mcore.build(SimpleNamespace(tp=1, sp=False, llama=form == "llama", dtype="float32", seed=3)).module
        dist_checkpointing.save(model.sharded_state_dict(), str(folder))
        mask = torch.ones(1, 1, 12, 12).triu(1).bool()
        logits = model(tokens, torch.arange(12).expand(2, 12), mask).detach()
        parallel_state.destroy_model_parallel()
        return logits

    patch.setitem(mcore.PLAIN, "activation_func", partial(gelu, approximate="tanh"))  # as Megatron-LM's fused one is
    with InprocEngine() as engine, megatron.session():
        (logits,) = engine.run(program, world_size=1)
    assert isinstance(logits, Tensor)
    return logits


@pytest.fixture
def core() -> None:
    if settings().max_examples <= 100:
        pytest.skip("Megatron-Core saves in processes of its own: in the deep profile")
    pytest.importorskip("megatron.core", reason="megatron-core (extra `peers`) is not installed")


@pytest.mark.slow
@pytest.mark.peers
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
    ours = decoder.logits(case, {name: drawn(case, name) for name in shapes(case)}, batch)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)  # float32
    assert not [one.message for one in prover.proof(case, subject).verdicts if one.verdict == FAIL]


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.usefixtures("core")
def test_megatron_core_reads_what_is_written_in_its_form(prover: Prover, tmp_path: Path) -> None:
    theirs, ours, back = (tmp_path / name for name in ("theirs", "ours", "back"))
    saved(theirs, 2)
    case = Case.parse(f"{WORDS} lr=0.1 fuse_mlp=true load={theirs} save={ours}")
    assert not [one.message for one in prover.proof(case, subject).verdicts if one.verdict == FAIL]
    assert compare(str(ours), str(theirs)).first is not None, "a step was trained between them"
    export(str(ours), str(back), str(theirs))
    assert compare(str(ours), str(back)).first is None
    for tp in (1, 2):
        saved(tmp_path / str(tp), tp, back)
        assert compare(str(ours), str(tmp_path / str(tp))).first is None
        assert compare(str(theirs), str(tmp_path / str(tp))).first is not None


def _like(folder: Path, *, numbered: bool, fused_norms: bool) -> None:
    """What dist_checkpointing writes for a model of two layers, 6 tokens padded to 8: by hand, from its source."""
    norm = "self_attention.linear_qkv.layer_norm_weight" if fused_norms else "input_layernorm.weight"
    layer = {norm: (8,), "self_attention.linear_qkv.weight": (16, 8), "self_attention.linear_proj.weight": (8, 8)}
    layer |= {"mlp.linear_fc1.weight": (10, 8), "mlp.linear_fc2.weight": (8, 5)}
    state: dict[str, Any] = {"embedding.word_embeddings.weight": torch.zeros(8, 8)}
    for name, shape in layer.items():
        if numbered:
            state |= {f"decoder.layers.{number}.{name}": torch.zeros(shape) for number in range(2)}
        else:
            state[f"decoder.layers.{name}"] = torch.zeros(2, *shape)
    state["decoder.layers.mlp.linear_fc1._extra_state/shard_0_2"] = io.BytesIO(b"what a module keeps")
    state["optimizer.state.exp_avg.decoder.final_layernorm.weight"] = torch.zeros(8)
    folder.mkdir()
    torch_format.write(folder, state)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (folder / "common.pt").write_bytes(b"what is the same on all ranks")


@pytest.mark.parametrize("numbered, fused_norms", [(False, False), (True, True)])
def test_what_is_written_in_its_form_is_read_again(tmp_path: Path, numbered: bool, fused_norms: bool) -> None:
    ours, like, theirs = (tmp_path / name for name in ("ours", "like", "theirs"))
    held = {"embedding.tokens.weight": numbers(6, 8, seed=9)}
    for number in range(2):
        layer = {"attention_norm": (8,), "attention.wqkv": (16, 8), "attention.wo": (8, 8)}
        layer |= {"mlp.w13": (10, 8), "mlp.w2": (8, 5)}
        held |= {f"layers.{number}.{name}.weight": numbers(*shape, seed=number) for name, shape in layer.items()}
    torch_save({f"model.{name}": tensor for name, tensor in held.items()}, checkpoint_id=ours, no_dist=True)
    _like(like, numbered=numbered, fused_norms=fused_norms)
    assert export(str(ours), str(theirs), str(like)) == 11
    assert compare(str(ours), str(theirs)).first is None and compare(str(ours), str(like)).first is not None
    written = tensors(str(theirs))
    assert written.keys() == tensors(str(like)).keys() - {"optimizer.state.exp_avg.decoder.final_layernorm.weight"}
    assert not written["embedding.word_embeddings.weight"][6:].any(), "padding"
    (kept,) = torch_format.bytes_in(theirs).values()
    assert kept.getvalue() == b"what a module keeps"
    assert (theirs / "common.pt").read_bytes() == (like / "common.pt").read_bytes()
    spoiled = {key: tensor.clone() for key, tensor in written.items()}
    next(tensor for key, tensor in spoiled.items() if key.endswith("fc2.weight"))[..., 0, 0] = torch.nan
    (tmp_path / "spoiled").mkdir()
    shutil.copyfile(theirs / "metadata.json", tmp_path / "spoiled" / "metadata.json")
    torch_format.write(tmp_path / "spoiled", spoiled)
    with pytest.raises(CheckpointError, match=r"linear_fc2.weight, of which elements are missing or are no numbers"):
        compare(str(ours), str(tmp_path / "spoiled"))
    file = theirs / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.state_dict_metadata["embedding.word_embeddings.weight"].chunks.pop()
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"embedding.word_embeddings.weight, of which elements are missing"):
        compare(str(ours), str(theirs))
    for key in ("layers.1.mlp.w2", "layers.2.mlp.w2"):  # one too few, then one too many
        name = f"model.{key}.weight"
        other = {f"model.{one}": tensor for one, tensor in held.items()} | {name: numbers(8, 5, seed=1)}
        if key.startswith("layers.1"):
            del other[name]
        torch_save(other, checkpoint_id=tmp_path / key, no_dist=True)
        with pytest.raises(CheckpointError, match=f"{name} |without {key}"):
            export(str(tmp_path / key), str(tmp_path / "new"), str(like))
        assert not (tmp_path / "new").exists()
