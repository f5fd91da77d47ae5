"""Real checkpoints: files of safetensors are cut and joined bit for bit, and names and shapes are Hugging Face's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardproof.parallel.communication.layout import Coordinates, Placement, shard
from shardproof.parallel.slicing import checkpoint
from shardproof.parallel.slicing.checkpoint import check
from shardproof.parallel.slicing.slices import slices
from shardproof.parallel.slicing.words import Sliced
from shardproof.reference.errors import CaseError

SMALL = "hidden=24 heads=4 ffn=40 vocab=61 positions=11"
OPT = f"family=opt {SMALL}"


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    """Writes tensors to a file of safetensors and returns its path."""
    torch_files = pytest.importorskip("safetensors.torch", reason="safetensors (extra `checkpoints`) is not installed")

    def save(tensors: dict[str, Tensor], name: str = "model.safetensors") -> str:
        torch_files.save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, str(tmp_path / name))
        return str(tmp_path / name)

    return save


def opt_weights(layers: int = 2, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """A checkpoint of OPT under its real names, tied: no weight of the head."""
    generator = torch.Generator().manual_seed(1)
    tensors: dict[str, Tensor] = {}
    for one in slices(Sliced.parse(f"{OPT} tp=1 path=autotp")):
        outer = one.name.startswith("model.")
        for prefix in [""] if outer else [f"model.decoder.layers.{layer}." for layer in range(layers)]:
            tensors[prefix + one.name] = torch.randn(one.place.shape, generator=generator).to(dtype)
    del tensors["model.decoder.layers.0.lm_head.weight"], tensors["model.decoder.layers.1.lm_head.weight"]
    return tensors


@pytest.mark.parametrize(
    ("path", "tp", "dtype"),
    [
        ("container", 1, torch.bfloat16),
        ("autotp", 2, torch.float32),
        ("container", 4, torch.int8),
        ("autotp", 4, torch.bfloat16),
    ],
)
def test_a_checkpoint_survives_the_cut(saved: Any, path: str, tp: int, dtype: torch.dtype) -> None:
    file = saved(opt_weights(dtype=dtype))
    found = check(Sliced.parse(f"{OPT} tp={tp} path={path}"), [file])
    assert found.wrong == () and found.left_out == ()
    assert found.times["attn_qkvw" if path == "container" else "self_attn.q_proj.weight"] == 2
    assert found.times["final_layer_norm.weight"] == 2 and found.times["model.decoder.final_layer_norm.weight"] == 1
    assert found.tensors == 2 * 16 + 4
    assert found.times["lm_head.weight"] == 0, "tied"


def test_several_files_are_one_checkpoint(saved: Any) -> None:
    tensors = opt_weights()
    keys = {name for name in tensors if "k_proj" in name}
    parts = [{name: tensor for name, tensor in tensors.items() if (name in keys) is own} for own in (True, False)]
    files = [saved(part, f"{number}.safetensors") for number, part in enumerate(parts)]
    assert check(Sliced.parse(f"{OPT} tp=2"), files).wrong == ()
    for alone, lacking in zip(files, "qk", strict=True):
        with pytest.raises(
            CaseError, match=rf"0.self_attn.{lacking}_proj.weight: is missing, and attn_qkvw is made of"
        ):
            check(Sliced.parse(f"{OPT} tp=2"), [alone])


def test_an_inexact_cut_is_seen(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: one rank's part in another dtype on its way, which loses bits."""

    def rounded(full: Tensor, place: Placement, at: Coordinates) -> Tensor:
        part = shard(full, place, at)
        return part.to(torch.float8_e4m3fn).to(part.dtype) if at["tp"][0] == 1 else part

    monkeypatch.setattr(checkpoint, "shard", rounded)
    norms = check(Sliced.parse(f"{OPT} tp=2"), [saved({k: v for k, v in opt_weights().items() if "norm" in k})])
    assert len(norms.wrong) == sum(norms.times.values()) == 10, "copies that disagree"
    wrong = check(Sliced.parse(f"{OPT} tp=2"), [saved({k: v for k, v in opt_weights().items() if "fc1" in k})]).wrong
    assert wrong == tuple(f"model.decoder.layers.{n}.inter_{leaf}" for leaf in "wb" for n in (0, 1))


def test_what_no_slice_is_about_is_named(saved: Any) -> None:
    file = saved({**opt_weights(), "model.decoder.project_in.weight": torch.zeros(2, 2)})
    assert check(Sliced.parse(f"{OPT} tp=2"), [file]).left_out == ("model.decoder.project_in.weight",)


def test_a_checkpoint_that_does_not_fit_is_refused(saved: Any, tmp_path: Path) -> None:
    file = saved(opt_weights())
    with pytest.raises(
        CaseError, match=r"has the shape \(24, 40\) as inter_w, and the words of the slice say \(24, 96\)"
    ):
        check(Sliced.parse(f"{OPT} ffn=96 tp=2"), [file])
    with pytest.raises(CaseError, match="has no tensor of family=bloom, such as self_attention.query_key_value.weight"):
        check(Sliced.parse("family=bloom hidden=24 heads=4 vocab=61 tp=2"), [file])
    with pytest.raises(CaseError, match=r"nothing.safetensors: is no file; legal: check=model.safetensors"):
        check(Sliced.parse(OPT), ["nothing.safetensors"])
    text = tmp_path / "text.safetensors"
    text.write_text("no tensors")
    with pytest.raises(CaseError, match="is no file of safetensors: "):
        check(Sliced.parse(OPT), [str(text)])
    with pytest.raises(CaseError, match="check=0.self_attn.k_proj.weight: is missing"):
        check(Sliced.parse(OPT), [saved({"0.self_attn.q_proj.weight": torch.zeros(24, 24)}, "q.safetensors")])


def test_without_the_package_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    with pytest.raises(
        CaseError, match="is read by the package safetensors, which is not installed; legal: pip install"
    ):
        check(Sliced.parse(OPT), ["model.safetensors"])


NEW_FALCON = {"new_decoder_architecture": True}
CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "opt": ("opt", "OPTDecoderLayer", {"word_embed_proj_dim": 24, "ffn_dim": 40, "max_position_embeddings": 9}),
    "llama": ("llama", "LlamaDecoderLayer", {"num_key_value_heads": 2, "intermediate_size": 40}),
    "phi3": ("phi3", "Phi3DecoderLayer", {"num_key_value_heads": 2, "intermediate_size": 40, "pad_token_id": 0}),
    "bloom": ("bloom", "BloomBlock", {}),
    "falcon": ("falcon", "FalconDecoderLayer", {**NEW_FALCON, "num_kv_heads": 2, "ffn_hidden_size": 40}),
    "mpt": ("mpt", "MptBlock", {}),
    "codegen": ("codegen", "CodeGenBlock", {"n_inner": 40, "rotary_dim": 2}),
    "bigcode": ("gpt_bigcode", "GPTBigCodeBlock", {"n_inner": 40, "n_positions": 11}),
}
"""Family -> its type at Hugging Face, the class of its layer, and words of a small configuration beside its sizes."""


@pytest.mark.peers
@pytest.mark.parametrize("family", CONFIGS)
def test_names_and_shapes_are_hugging_face_s(family: str) -> None:
    """Every tensor of a slice is one of the model's state dict, and every one of the model's is in a slice."""
    transformers = pytest.importorskip("transformers", reason="transformers (extra `peers`) is not installed")
    kind, layer, words = CONFIGS[family]
    sizes = {"hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 61}
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(kind, **sizes, **words)
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert any(type(module).__name__ == layer for module in model.modules()), "the name that DeepSpeed looks for"
    kv = "kv_heads=2" if family in ("llama", "phi3", "falcon") else ""
    ffn = {"bloom": 96, "mpt": 96}.get(family, 40)
    made = slices(Sliced.parse(f"family={family} {SMALL} ffn={ffn} {kv} tp=1 path=autotp"))
    theirs = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    used = set()
    for one in made:
        names = [name for name in theirs if name == one.name or name.endswith(f".{one.name}")]
        assert names, one.name
        assert {theirs[name] for name in names} == {one.place.shape}, one.name
        used.update(names)
    assert {name for name in theirs if name not in used} == set()
