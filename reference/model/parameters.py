"""Every parameter of the dense model: its name, its shape, and its full value, which follows from the case alone.

Shapes count elements; a linear weight is [out, in]. `attention.wqkv.weight` holds, per kv group, the group's query
heads, then its key head, then its value head: rows (kv_heads, heads/kv_heads + 2, head_dim). The vocabulary is never
padded here. No bias and no norm weight is 0 or 1, where a wrong treatment could hide, unless init=field. With
init=shard the ranks draw the values, and return them.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping
from functools import lru_cache

import torch
from torch import Tensor

from shardproof.reference.case import Case
from shardproof.reference.checkpoints.foreign import stored_tensors
from shardproof.reference.errors import CaseError
from shardproof.reference.model.branch import branch_of
from shardproof.reference.model.randomness import field_values, given_now

Shape = tuple[int, ...]
_LARGE = 2**20
"""`LastRead` keeps no weight of more elements."""


def dtype_of(case: Case) -> torch.dtype:
    """The torch dtype that the case runs in."""
    dtype = getattr(torch, case.dtype)
    assert isinstance(dtype, torch.dtype)  # the case's rules allow names of torch dtypes only
    return dtype


def shapes(case: Case) -> dict[str, Shape]:
    """Parameter name -> full shape, in the order of the forward pass."""
    return dict(_shapes(case))


@lru_cache(maxsize=8)
def _shapes(case: Case) -> dict[str, Shape]:
    found: dict[str, Shape] = {"embedding.tokens.weight": (case.vocab, case.hidden)}
    if case.positions == "learned":
        found["embedding.positions.weight"] = (case.seq, case.hidden)
    for layer in range(case.layers):
        found |= _block(case, f"layers.{layer}")
    found |= _norm(case, "final_norm", case.hidden)
    if not case.tied:
        found["head.weight"] = (case.vocab, case.hidden)
    for feature in case.behind_decoder:
        for name, shape in branch_of(feature).shapes(case).items():
            found |= _block(case, name) if name in case.blocks else {name: shape}
    return found


def full(case: Case, name: str, *, device: torch.device | str = "cpu") -> Tensor:
    """The full value of one parameter in the case's dtype; on the meta device its shape alone, at no cost.

    Values are drawn uniformly in float64 from a generator seeded with sha256(seed, name), with init=field as in
    `field_values`, then rounded. So every dtype, mode and mesh starts from the same numbers. With `load=` it is the
    checkpoint's, and with init=shard the one that was given. Raises ValueError for a name that the case does not have,
    and CaseError if no value was given, or the checkpoint is of another model.
    """
    if torch.device(device).type == "meta":
        return torch.empty(_shape(case, name), dtype=dtype_of(case), device=device)
    return drawn_weight(case, name).to(device, copy=True)


def drawn_weight(case: Case, name: str) -> Tensor:
    """The full value of a parameter on the CPU, shared by all callers: never written to.

    Parameters are kept until those of another model are drawn. Raises ValueError for a name that the case does not
    have, and CaseError as `full` does.
    """
    shape, dtype = _shape(case, name), dtype_of(case)
    if case.load:
        return _load_weight(case, name, shape).to(dtype)
    if case.init == "shard":
        if f"init/{name}" in given_now():
            return given_now()[f"init/{name}"].to(dtype)  # wider for masters
        rule = f"draws values that the dense model must be given, and init/{name} was not returned"
        raise CaseError("init", case.init, rule, "init=field, or return the initial values under that name")
    weights = _drawn_weights(case)
    if name not in weights:
        value = field_values(case, name, shape) if case.init == "field" else _draw(case.seed, name, shape)
        weights[name] = value.to(dtype)
    return weights[name]


class LastRead(Mapping[str, Tensor]):
    """Every full weight of the case, as `weights` has them, for a caller that reads each once.

    That caller probably is the last, so large weights are not kept afterwards.
    """

    def __init__(self, case: Case, device: torch.device) -> None:
        self._case, self._device = case, device

    def __getitem__(self, name: str) -> Tensor:
        value = drawn_weight(self._case, name)
        if value.numel() > _LARGE:
            _drawn_weights(self._case).pop(name, None)
        return value.to(self._device)

    def __iter__(self) -> Iterator[str]:
        return iter(_shapes(self._case))

    def __len__(self) -> int:
        return len(_shapes(self._case))


def _load_weight(case: Case, name: str, shape: Shape) -> Tensor:
    """The parameter as the checkpoint of the case holds it."""
    found = stored_tensors(case).get(f"model.{name}")
    if found is None or tuple(found.shape) != shape:
        stored_as = "no such tensor" if found is None else f"one of shape {tuple(found.shape)}"
        rule = f"is a checkpoint of another model: it holds {stored_as} as model.{name}, which is {shape} here"
        raise CaseError("load", case.load, rule, "a checkpoint of the same model")
    return found


def weights(case: Case, device: torch.device) -> dict[str, Tensor]:
    """Every full weight of the case by name, in its dtype, to be read only (see `drawn_weight`).

    Raises CaseError for a checkpoint with parameters that the case does not have.
    """
    names = (
        [key.removeprefix("model.") for key in stored_tensors(case) if key.startswith("model.")] if case.load else []
    )
    if others := [name for name in names if name not in shapes(case)]:
        rule = f"is a checkpoint of another model: {len(others)} tensors are not of this one, the first is {others[0]}"
        raise CaseError("load", case.load, rule, "a checkpoint of the same model")
    return {name: drawn_weight(case, name).to(device) for name in shapes(case)}


def _shape(case: Case, name: str) -> Shape:
    shape = _shapes(case).get(name)
    if shape is None:
        legal = next(iter(_shapes(case)))
        raise ValueError(f"name={name}: is not a parameter of the case '{case}'; legal: {legal}")
    return shape


def _drawn_weights(case: Case) -> dict[str, Tensor]:
    return _latest(case.seed, dtype_of(case), (case.init, *_shapes(case).items()))


@lru_cache(maxsize=1)
def _latest(_seed: int, _dtype: torch.dtype, _kind: tuple[object, ...]) -> dict[str, Tensor]:
    """A cache of the weights of the model that was drawn last."""
    return {}


def _draw(seed: int, name: str, shape: Shape) -> Tensor:
    digest = hashlib.sha256(f"{seed} {name}".encode("ascii")).digest()
    generator = torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    unit = torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu").mul_(2).sub_(1)
    return _scale_unit(name, unit)


def _scale_unit(name: str, unit: Tensor) -> Tensor:
    """Numbers of [-1, 1) scaled so that some steps of SGD with lr=1 amplify rounding errors little."""
    module, _, leaf = name.rpartition(".")
    if leaf == "bias":
        return 0.2 * _away(unit)
    if module.endswith("norm"):
        return 1 + 0.5 * _away(unit)
    return unit.mul_(math.sqrt(0.75 / unit.shape[-1]))  # standard deviation 1 / (2 sqrt(in))


def _away(unit: Tensor) -> Tensor:
    """Numbers with the same signs and magnitudes in [1/4, 1), so that none is near 0."""
    return (0.25 + 0.75 * unit.abs()).copysign(unit)


def _block(case: Case, block: str) -> dict[str, Shape]:
    """The parameters of the transformer layer of this name."""
    found: dict[str, Shape] = {}
    for branch, plain in (("attention", _attention), ("mlp", _mlp)):
        replaced = getattr(case, "replaced_branches", None)  # a case of plain words has no features
        other = replaced(case.blocks[block]).get(branch) if replaced else None
        shapes_of = branch_of(other).shapes if other else plain
        found |= _norm(case, f"{branch}_norm", case.hidden) | shapes_of(case)
    return {f"{block}.{name}": shape for name, shape in (found | case.layer_shapes).items()}


def _attention(case: Case) -> dict[str, Shape]:
    hidden, head_dim = case.hidden, case.head_dim
    heads, kv = case.heads * head_dim, case.kv_heads * head_dim
    found: dict[str, Shape] = {}
    if case.fuse_qkv:
        found |= _linear(case, "attention.wqkv", heads + 2 * kv, hidden)
    else:
        found |= _linear(case, "attention.wq", heads, hidden)
        found |= _linear(case, "attention.wk", kv, hidden)
        found |= _linear(case, "attention.wv", kv, hidden)
    if case.qk_norm:
        found |= _norm(case, "attention.q_norm", head_dim) | _norm(case, "attention.k_norm", head_dim)
    return found | _linear(case, "attention.wo", hidden, heads)


def _mlp(case: Case) -> dict[str, Shape]:
    hidden = case.hidden
    found: dict[str, Shape] = {}
    if case.fuse_mlp:
        found |= _linear(case, "mlp.w13", 2 * case.ffn, hidden)
    else:
        found |= _linear(case, "mlp.w1", case.ffn, hidden)
        if case.activation == "swiglu":
            found |= _linear(case, "mlp.w3", case.ffn, hidden)
    return found | _linear(case, "mlp.w2", hidden, case.ffn)


def _linear(case: Case, module: str, rows: int, columns: int) -> dict[str, Shape]:
    bias = {f"{module}.bias": (rows,)} if case.bias else {}
    return {f"{module}.weight": (rows, columns), **bias}


def _norm(case: Case, module: str, width: int) -> dict[str, Shape]:
    bias = {f"{module}.bias": (width,)} if case.norm == "layernorm" else {}
    return {f"{module}.weight": (width,), **bias}
