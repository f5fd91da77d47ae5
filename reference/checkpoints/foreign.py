"""Folders of other systems: which system wrote one, and its parameters in the names of the dense model.

    Hugging Face      config.json and files of safetensors, as `save_pretrained` writes them
    Megatron-Core     metadata.json and files of torch's format, as `dist_checkpointing.save` writes them

Parameters alone are read.

Query, key and value, gate and up are one tensor or several:

    attention.wqkv   per kv group: its queries, its key, its value      attention.wq, .wk, .wv
    mlp.w13          gate, then up                                      mlp.w1, .w3

Both directions are exact. A bias is split or fused as the rows of its weight are.

Names of Hugging Face. The base of the rotation and the epsilon of the norms are those of the dense model. Sources:
transformers 5.23 `modeling_llama.py`, `modeling_qwen3.py`, `modeling_gpt2.py` (Conv1D holds [in, out]).

    llama, qwen3     q_proj, k_proj, v_proj, o_proj: wq, wk, wv, wo; gate_proj, up_proj, down_proj: w1, w3, w2;
                     rotary pairs are (i, i + D/2), as here
    gpt2             c_attn [in, q | k | v]: transposed, thirds; c_proj, c_fc transposed

Files of Megatron-Core (`dist_checkpointing`, backend torch_dist), whose vocabulary is padded:

    tensors of torch's format    parameters; layers in one tensor along a first dim, or under their number
    bytes of torch's format      `<module>._extra_state/shard_<layer>_<layers>`: what a module keeps beside them
    metadata.json, common.pt     the format; what is the same on all ranks

As in the dense model with fuse_qkv=true and fuse_mlp=true, qkv is fused by kv groups, gate and up one behind the other.
Source: Megatron-Core 0.16.1 `GPTModel.sharded_state_dict`, `TransformerBlock.sharded_state_dict`.

The checkpoint that a case begins with (`load=`), as torch's own loader reads it: full tensors, no layout.

    model.<name>                                      a parameter
    optimizer.state.<name>.exp_avg, exp_avg_sq, step  adamw's states of it
    train.steps, train.loss_scale                     steps that were run before, state of the loss scale

The ranks under test read the same files by a reader of their own, so an error of either reader shows. A folder of
another system has parameters alone; it is read here for both, and ranks cut theirs out of these.
"""

import importlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.checkpoints.torch_format import read_tensors
from shardproof.reference.errors import CaseError


class LayoutError(ValueError):
    """A folder that does not hold the tensors of one model. Says what it holds, and what is legal."""

    def __init__(self, rule: str, legal: str = "the tensors of one model") -> None:
        super().__init__(rule)
        self.rule, self.legal = rule, legal


def split_fused(tensors: Mapping[str, Tensor], kv_heads: int, *, qkv: bool = True) -> dict[str, Tensor]:
    """All tensors, the fused ones in parts; without `qkv` only gate and up are taken apart. Raises LayoutError for
    heads that do not fit.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        layer, _, last = module.rpartition(".")
        if last == "wqkv" and qkv:
            queries, width = _sizes(tensors, name, f"{layer}.wo.weight", kv_heads)
            groups = tensor.reshape(kv_heads, queries // kv_heads // width + 2, width, *tensor.shape[1:])
            for part, rows in (("wq", groups[:, :-2]), ("wk", groups[:, -2]), ("wv", groups[:, -1])):
                found[f"{layer}.{part}.{leaf}"] = rows.reshape(-1, *tensor.shape[1:])
        elif last == "w13":
            if _rows(tensor) % 2:
                raise LayoutError(f"holds {name} of {_shape(tensor)}, which is no gate and up")
            found[f"{layer}.w1.{leaf}"], found[f"{layer}.w3.{leaf}"] = tensor.chunk(2)
        else:
            found[name] = tensor
    return found


def fuse(tensors: Mapping[str, Tensor], kv_heads: int, *, qkv: bool, mlp: bool) -> dict[str, Tensor]:
    """The parts of queries, keys and values (`qkv`), of gate and up (`mlp`), as one tensor each.

    Raises LayoutError for parts that are missing or are not of these heads.
    """
    found = dict(tensors)
    for name in [name for name in tensors if qkv and ".wq." in name]:
        query, key, value = parts = _pop_parts(found, name, ".wq.", ("wq", "wk", "wv"))
        width = _rows(key) // kv_heads if kv_heads > 0 else 0
        fit = width and _rows(key) == width * kv_heads and _rows(query) % (width * kv_heads) == 0
        if not fit or key.shape != value.shape or query.shape[1:] != key.shape[1:]:
            shapes = ", ".join(map(_shape, parts))
            raise LayoutError(f"holds {name} and its key and value of {shapes}, which are not of {kv_heads} kv heads")
        groups = [part.reshape(kv_heads, -1, *part.shape[1:]) for part in parts]
        found[name.replace(".wq.", ".wqkv.")] = torch.cat(groups, 1).flatten(0, 1)
    for name in [name for name in tensors if mlp and ".w3." in name]:
        up, gate = _pop_parts(found, name, ".w3.", ("w3", "w1"))
        if up.shape != gate.shape:
            raise LayoutError(f"holds {name} of {_shape(up)} and a gate of {_shape(gate)}")
        found[name.replace(".w3.", ".w13.")] = torch.cat([gate, up])
    return found


def kv_heads_of(tensors: Mapping[str, Tensor]) -> int:
    """The number of key and value heads, if a norm of keys shows how wide one is; else 0."""
    for name, norm in tensors.items():
        layer, _, last = name.rpartition(".k_norm.")
        if layer and last == "weight" and _rows(norm):
            key, fused, out = (tensors.get(f"{layer}.{part}.weight") for part in ("wk", "wqkv", "wo"))
            if key is None and fused is not None and out is not None and out.dim() == 2:
                return (_rows(fused) - out.shape[1]) // 2 // len(norm)
            return 0 if key is None else _rows(key) // len(norm)
    return 0


def _sizes(tensors: Mapping[str, Tensor], name: str, out: str, kv_heads: int) -> tuple[int, int]:
    """(rows of all queries, rows of a head) of a fused tensor."""
    if out not in tensors or tensors[out].dim() != 2:
        raise LayoutError(f"holds {name} and no {out} that says how many rows of it are queries")
    queries = tensors[out].shape[1]
    width, rest = divmod(_rows(tensors[name]) - queries, 2 * kv_heads) if kv_heads > 0 else (0, 0)
    if width < 1 or rest or queries % (width * kv_heads):
        shape = _shape(tensors[name])
        raise LayoutError(
            f"holds {name} of {shape}, of which {queries} rows are queries: these are not {kv_heads} kv heads"
        )
    return queries, width


def _pop_parts(found: dict[str, Tensor], name: str, part: str, others: tuple[str, ...]) -> list[Tensor]:
    names = [name.replace(part, f".{other}.") for other in others]
    if missing := [one for one in names if one not in found]:
        raise LayoutError(f"holds {name} without {missing[0]}")
    return [found.pop(one) for one in names]


def _rows(tensor: Tensor) -> int:
    return len(tensor) if tensor.dim() else 0


def _shape(tensor: Tensor) -> str:
    return f"({', '.join(map(str, tensor.shape))})"


_LLAMA = {
    "model.embed_tokens": "embedding.tokens",
    "model.norm": "final_norm",
    "lm_head": "head",
    "model.layers.#.input_layernorm": "layers.#.attention_norm",
    "model.layers.#.self_attn.q_proj": "layers.#.attention.wq",
    "model.layers.#.self_attn.k_proj": "layers.#.attention.wk",
    "model.layers.#.self_attn.v_proj": "layers.#.attention.wv",
    "model.layers.#.self_attn.o_proj": "layers.#.attention.wo",
    "model.layers.#.self_attn.q_norm": "layers.#.attention.q_norm",
    "model.layers.#.self_attn.k_norm": "layers.#.attention.k_norm",
    "model.layers.#.post_attention_layernorm": "layers.#.mlp_norm",
    "model.layers.#.mlp.gate_proj": "layers.#.mlp.w1",
    "model.layers.#.mlp.up_proj": "layers.#.mlp.w3",
    "model.layers.#.mlp.down_proj": "layers.#.mlp.w2",
}
_GPT2 = {
    "transformer.wte": "embedding.tokens",
    "transformer.wpe": "embedding.positions",
    "transformer.ln_f": "final_norm",
    "lm_head": "head",
    "transformer.h.#.ln_1": "layers.#.attention_norm",
    "transformer.h.#.attn.c_attn": "layers.#.attention.thirds",
    "transformer.h.#.attn.c_proj": "layers.#.attention.wo",
    "transformer.h.#.ln_2": "layers.#.mlp_norm",
    "transformer.h.#.mlp.c_fc": "layers.#.mlp.w1",
    "transformer.h.#.mlp.c_proj": "layers.#.mlp.w2",
}
_HUGGING_FACE_NAMES = {"llama": _LLAMA, "qwen3": _LLAMA, "gpt2": _GPT2}
_BUFFERS = re.compile(r"\.rotary_emb\.|\.attn\.(masked_)?bias$")
_CONFIG = "config.json"


def is_hugging_face(folder: Path) -> bool:
    """Whether a folder holds a config and files of safetensors."""
    return (folder / _CONFIG).is_file() and any(folder.glob("*.safetensors"))


def config_of(folder: Path) -> dict[str, Any]:
    """The config in a folder. Raises LayoutError for one that cannot be read, and for an unknown model."""
    try:
        config = json.loads((folder / _CONFIG).read_bytes())
        kind = config["model_type"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as problem:
        rule = f"has a {_CONFIG} that cannot be read ({type(problem).__name__}: {problem})"
        raise LayoutError(rule, "a folder that save_pretrained wrote") from problem
    if not isinstance(kind, str) or kind not in _HUGGING_FACE_NAMES:
        raise LayoutError(f"is a model of model_type {kind}", "|".join(_HUGGING_FACE_NAMES))
    assert isinstance(config, dict)
    return config


def heads_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """(query heads, key and value heads) of a model. Raises LayoutError for impossible numbers."""
    queries = config.get("num_attention_heads", config.get("n_head"))
    kv_heads = config.get("num_key_value_heads", queries)
    if type(queries) is int and type(kv_heads) is int and min(queries, kv_heads) > 0 and queries % kv_heads == 0:
        return queries, kv_heads
    rule = f"has a {_CONFIG} of {queries} query heads and {kv_heads} key and value heads"
    raise LayoutError(rule, "num_attention_heads=4 num_key_value_heads=2")


def read_hugging_face(folder: Path, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Every parameter in full, by its name in the dense model; query, key and value apart, gate and up too.

    Raises LayoutError for tensors that are not of this config's model and heads, for unreadable files, and without
    safetensors.
    """
    known, parts = _HUGGING_FACE_NAMES[config["model_type"]], dict[str, Tensor]()
    tied = bool(config.get("tie_word_embeddings", known is _GPT2))
    for name, stored in _read_files(folder):
        whole = f"transformer.{name}" if known is _GPT2 and not name.startswith(("transformer.", "lm_head.")) else name
        module, _, leaf = whole.rpartition(".")
        if _BUFFERS.search(whole) or (tied and module == "lm_head"):
            continue
        number = re.search(r"\.(\d+)\.", module)
        ours = known.get(module.replace(f".{number[1]}.", ".#.", 1) if number else module)
        if ours is None:
            raise LayoutError(f"holds {name}, which the dense model does not have", "|".join(_HUGGING_FACE_NAMES))
        if not stored.is_floating_point() or not 1 <= stored.dim() <= 2:
            rule = f"holds {name} of {stored.dtype} with {stored.dim()} dims, which is no parameter"
            raise LayoutError(rule, "vectors and matrices of real numbers")
        turned = known is _GPT2 and ours.startswith("layers.") and not ours.endswith("norm") and leaf == "weight"
        tensor = stored.t().contiguous() if turned else stored  # linears of GPT-2 hold [in, out]
        ours = ours.replace("#", number[1]) if number else ours
        if not ours.endswith(".thirds"):
            parts[f"{ours}.{leaf}"] = tensor
            continue
        if len(tensor) % 3:
            raise LayoutError(f"holds c_attn of {len(tensor)} columns", "three times as many")
        for part, third in zip("qkv", tensor.chunk(3), strict=True):
            parts[f"{ours.removesuffix('thirds')}w{part}.{leaf}"] = third
    _check_heads(config, parts)
    return parts


def _check_heads(config: Mapping[str, Any], parts: Mapping[str, Tensor]) -> None:
    """Raise LayoutError unless queries, keys and values have the heads that the config states."""
    queries, kv_heads = heads_of(config)
    counts = {"wq": queries, "wk": kv_heads, "wv": kv_heads}
    for name, tensor in parts.items():
        part = name.split(".")[-2]
        query = parts.get(name.replace(f".{part}.", ".wq."))
        if part in counts and query is not None:
            stated = config.get("head_dim")
            width = stated if isinstance(stated, int) else len(query) // queries
            if len(tensor) != counts[part] * width:
                rule = f"holds {name} of {len(tensor)} rows, which are not {counts[part]} heads of {width}"
                raise LayoutError(rule, f"the heads of its {_CONFIG}")


def _read_files(folder: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        library: Any = importlib.import_module("safetensors.torch")
    except ImportError:
        rule = "is read and written by the package safetensors, which is not installed"
        raise LayoutError(rule, "pip install 'shardproof[checkpoints]'") from None
    for file in sorted(folder.glob("*.safetensors")):
        try:
            yield from library.load_file(file).items()
        except Exception as problem:  # torn files raise errors of the library
            rule = f"has a file that cannot be read, {file.name} ({type(problem).__name__}: {problem})"
            raise LayoutError(rule, "every file as save_pretrained wrote it") from problem


_MEGATRON_NAMES = {
    "embedding.word_embeddings": "embedding.tokens",
    "embedding.position_embeddings": "embedding.positions",
    "output_layer": "head",
    "decoder.final_layernorm": "final_norm",
    "decoder.layers.input_layernorm": "layers.#.attention_norm",
    "decoder.layers.self_attention.linear_qkv": "layers.#.attention.wqkv",
    "decoder.layers.self_attention.linear_proj": "layers.#.attention.wo",
    "decoder.layers.self_attention.q_layernorm": "layers.#.attention.q_norm",
    "decoder.layers.self_attention.k_layernorm": "layers.#.attention.k_norm",
    "decoder.layers.pre_mlp_layernorm": "layers.#.mlp_norm",
    "decoder.layers.mlp.linear_fc1": "layers.#.mlp.w1",
    "decoder.layers.mlp.linear_fc2": "layers.#.mlp.w2",
}
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_OTHERS = ("optimizer.", "rng_state")


def is_megatron(folder: Path) -> bool:
    """Whether a folder holds a checkpoint of dist_checkpointing."""
    marked = folder / "metadata.json"
    return marked.is_file() and b'"sharded_backend"' in marked.read_bytes()


def read_megatron(folder: Path, *, vocab: int) -> dict[str, Tensor]:
    """The full parameters of a Megatron checkpoint, by their names in the dense model.

    The vocabulary is cut to `vocab` rows; 0 keeps its padding. Raises LayoutError for a tensor that the dense model
    does not have, or that is incomplete, and CaseError for files that torch cannot read.
    """
    stored = {key: tensor for key, tensor in read_tensors(str(folder)).items() if not key.startswith(_OTHERS)}
    gated, found = _is_gated(stored), dict[str, Tensor]()
    for key, tensor in stored.items():
        if not tensor.dim() or not tensor.is_floating_point() or tensor.isnan().any():
            rule = f"holds {key}, of which elements are missing or are no numbers"
            raise LayoutError(rule, "a number for every element")
        ours, number = _dense_name(key, gated=gated)
        layers = enumerate(tensor) if "#" in ours and not number else [(number, tensor)]
        found |= {ours.replace("#", str(layer)): part for layer, part in layers}
        if key in _VOCABULARY:
            found[ours] = tensor[: vocab or len(tensor)]
    return found


def _dense_name(key: str, *, gated: bool) -> tuple[str, str]:
    """(the name in the dense model, its layer as "#"; the number of the layer, "" if the tensor holds all of them).

    Raises LayoutError for a tensor that the dense model does not have.
    """
    number = re.search(r"\.layers\.(\d+)\.", key)
    plain = key.replace(f".{number[1]}.", ".", 1) if number else key
    plain = re.sub(r"self_attention\.linear_qkv\.layer_norm_", "input_layernorm.", plain)
    plain = re.sub(r"mlp\.linear_fc1\.layer_norm_", "pre_mlp_layernorm.", plain)
    module, _, leaf = plain.rpartition(".")
    ours = _MEGATRON_NAMES.get(module)
    if ours is None:
        raise LayoutError(f"holds {key}, which the dense model does not have", "a GPTModel's")
    fused = "3" if gated and ours.endswith(".w1") else ""
    return f"{ours}{fused}.{leaf}", number[1] if number else ""


def _is_gated(tensors: Mapping[str, Tensor]) -> bool:
    """Whether the first linear of the MLP holds a gate too, so that it is twice as wide as the second one."""
    widths = {re.sub(r"\.\d+", "", key): [*tensor.shape] for key, tensor in tensors.items()}
    first, second = (widths.get(f"decoder.layers.mlp.{name}.weight", [0]) for name in ("linear_fc1", "linear_fc2"))
    return len(first) > 1 and first[-2] == 2 * second[-1] > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The form of parameters: whether query, key and value are one tensor, and gate and up.

    `kv_heads` is 0 for the number that the folder states. `vocab` is the vocabulary without padding, 0 for all rows.
    """

    fuse_qkv: bool
    fuse_mlp: bool
    kv_heads: int = 0
    vocab: int = 0


def is_foreign(folder: Path) -> bool:
    """Whether another system wrote a folder."""
    return is_hugging_face(folder) or is_megatron(folder)


def parameters(folder: Path, form: Form) -> dict[str, Tensor]:
    """Every parameter of another system's folder in full, by its name in the dense model.

    Raises CaseError for an unknown model, for other key and value heads or none that are stated although they are
    needed, for tensors that do not fit one another, and for files that cannot be read.
    """
    try:
        if is_megatron(folder):
            stored = read_megatron(folder, vocab=form.vocab)
            kv_heads = _kv_heads(kv_heads_of(stored), form.kv_heads)
            if not form.fuse_qkv and kv_heads == 0:
                rule = "holds query, key and value in one tensor, and nothing says of how many heads"
                raise CaseError("load", str(folder), rule, "a checkpoint of fuse_qkv=true beside it")
            parts = split_fused(stored, kv_heads, qkv=kv_heads > 0)
        else:
            config = config_of(folder)
            kv_heads = _kv_heads(heads_of(config)[1], form.kv_heads)
            parts = read_hugging_face(folder, config)
        return fuse(parts, kv_heads, qkv=form.fuse_qkv, mlp=form.fuse_mlp)
    except LayoutError as problem:
        raise CaseError("load", str(folder), problem.rule, problem.legal) from problem


def _kv_heads(stated: int, wanted: int) -> int:
    """The key and value heads that a folder states, else those of the form."""
    if 0 not in (stated, wanted) and stated != wanted:
        raise LayoutError(f"has {stated} key and value heads, not {wanted}", f"kv_heads={stated}")
    return stated or wanted


def stored_tensors(case: Case) -> Mapping[str, Tensor]:
    """The tensors of the checkpoint that the case loads, by key, not to be written to; no states of random streams.

    Raises CaseError as `read_tensors` does.
    """
    folder = Path(case.load)
    if not is_foreign(folder):
        return read_tensors(case.load)
    written_ns = max(file.stat().st_mtime_ns for file in folder.iterdir())
    form = Form(fuse_qkv=case.fuse_qkv, fuse_mlp=case.fuse_mlp, kv_heads=case.kv_heads, vocab=case.vocab)
    return _foreign(folder, form, written_ns)


def steps_before(case: Case) -> int:
    """The optimizer steps that were run before the first one of the case; 0 for a case that loads nothing."""
    return int(stored_tensors(case)["train.steps"]) if case.load else 0


@lru_cache(maxsize=2)
def _foreign(folder: Path, form: Form, _written_ns: int) -> Mapping[str, Tensor]:
    """The parameters of a folder as a checkpoint from which training begins."""
    found = {f"model.{name}": tensor for name, tensor in parameters(folder, form).items()}
    return found | {"train.steps": torch.tensor(0)}
