"""Every tensor shape that InternEvo's page "Data Load and Procedure" prints for the forward pass, on a real run.

The page's words stand on the left (micro_bsz, seq_len, sp_size ...), the real tensors of ranks on the right. They are
module inputs and outputs by forward hooks, and q, k, v, kv and context where attention hands them over. Corrections
(modes.md 7, 000):

    9    the token table is cut too, and is checked with the others
    10   what is gathered after attention is the context
    11   with sp > num_kv_attention_heads every rank gets one kv head, not kv // sp = 0
    6, 7 logits [1, T, V] are [1, T, V/tp] unless they are gathered; isp's [1, T/sp, V] is the page's own time's
         (head=local), now they are exchanged to [1, T, V/sp]
    8    linears have no bias here: the page prints both
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel.communication.batch import deliver
from parallel.communication.mesh import Mesh
from parallel.layers.attention import Attention, Core
from parallel.registry import scheme_of
from parallel.training.loop import set_up
from reference.case import Case
from tests.parallel.ranks import CPU, on_ranks

Shape = tuple[int, ...]
Shapes = dict[str, Shape]

MICRO_BSZ, SEQ_LEN, HIDDEN, HEADS, VOCAB, RATIO, MULTIPLE_OF = 2, 12, 48, 8, 264, 3.5, 16
DIM, FFN = HIDDEN // HEADS, MULTIPLE_OF * ((int(HIDDEN * RATIO) + MULTIPLE_OF - 1) // MULTIPLE_OF)
TOKENS = MICRO_BSZ * SEQ_LEN
COMMON = (
    f"family=internlm2 layers=1 packed=true batch={MICRO_BSZ} seq={SEQ_LEN} hidden={HIDDEN} heads={HEADS} "
    f"ffn={FFN} vocab={VOCAB} steps=1 micro=1"
)


@contextmanager
def _hooked(model: nn.Module, notes: Shapes) -> Iterator[None]:
    """Notes every module's first input and its output, and what attention's exchange gets, gives and hands its core."""

    def note(name: str, _module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        notes[f"{name} in"], notes[f"{name} out"] = tuple(getattr(args[0], "shape", ())), tuple(output.shape)

    hooks = [m.register_forward_hook(partial(note, name)) for name, m in model.named_modules() if name]
    attention = model.get_submodule("layers.0.attention")
    assert isinstance(attention, Attention)
    attention.exchange = partial(_noted_exchange, notes, attention.exchange)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _noted_exchange(notes: Shapes, exchange: Any, core: Core, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def noted_core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        context = core(q, k, v)
        notes.update({"core q": tuple(q.shape), "core kv": tuple(torch.stack((k, v), 2).shape)})
        notes["core context"] = tuple(context.shape)
        return context

    notes.update({"q": tuple(q.shape), "k": tuple(k.shape), "v": tuple(v.shape)})
    notes["kv"] = tuple(torch.stack((k, v), 2).shape)
    context: Tensor = exchange(noted_core, q, k, v)
    notes["context"] = tuple(context.shape)
    return context


def _run(case: Case) -> list[Shapes]:
    """By rank: the shapes of parameters and of everything noted in the forward of one micro-batch."""

    def program(rank: int) -> Shapes:
        state = set_up(case, scheme_of(case.mode), Mesh.of(case), CPU)
        notes: Shapes = {name: tuple(parameter.shape) for name, parameter in state.model.named_parameters()}
        batch = state.parts.local(deliver(case, state.mesh, 0, 0, CPU))
        with _hooked(state.model, notes):
            state.model(batch)
        return {**notes, "input_ids": tuple(batch.tokens.shape), "label": tuple(batch.labels.shape)}

    return on_ranks(case.world_size, program)


def _holds(case: Case, expected: Shapes) -> None:
    for rank, found in enumerate(_run(case)):
        assert {name: found.get(name) for name in expected} == expected, rank


def _module_outputs(tokens: int, columns: Shapes, hidden: Shape) -> Shapes:
    """Names of module outputs: column linears' by name, and everything that is hidden states."""
    layer = ("attention_norm", "attention.wo", "attention", "mlp_norm", "mlp.w2", "mlp")
    names = ["embedding", *(f"layers.0.{name}" for name in layer), "layers.0", "final_norm"]
    return {f"{name} out": hidden for name in names} | {
        f"layers.0.{name} out": (1, tokens, *shape) for name, shape in columns.items()
    }


def _parameters(qkv: int, parts: int, *, column: bool) -> Shapes:
    """Parameters cut into parts: `wo` and `w2` by columns, or by rows as all others; norms are whole."""
    wo, w2 = (
        ((HIDDEN, HIDDEN // parts), (HIDDEN, FFN // parts))
        if column
        else ((HIDDEN // parts, HIDDEN), (HIDDEN // parts, FFN))
    )
    layer = {"attention.wqkv": (qkv // parts, HIDDEN), "attention.wo": wo, "mlp.w2": w2}
    layer |= dict.fromkeys(("mlp.w1", "mlp.w3"), (FFN // parts, HIDDEN))
    norms: Shapes = dict.fromkeys(("layers.0.attention_norm", "layers.0.mlp_norm", "final_norm"), (HIDDEN,))
    tables = {"embedding.tokens": (VOCAB, HIDDEN // parts), "head": (VOCAB // parts, HIDDEN)}
    every = {**{f"layers.0.{name}": shape for name, shape in layer.items()}, **norms, **tables}
    return {f"{name}.weight": shape for name, shape in every.items()}


def _attention(tokens: int, heads: int, kv: int, core_heads: int, core_kv: int) -> Shapes:
    """Tensors at the exchange of attention and in its core, which has whole rows; labels are whole too."""
    whole = (1, TOKENS, core_heads, DIM)
    found = dict.fromkeys(("q", "context"), (1, tokens, heads, DIM)) | dict.fromkeys(("k", "v"), (1, tokens, kv, DIM))
    found |= dict.fromkeys(("core q", "core context"), whole)
    return {**found, "kv": (1, tokens, 2, kv, DIM), "core kv": (1, TOKENS, 2, core_kv, DIM), "label": (1, TOKENS)}


@pytest.mark.parametrize(
    ("name", "tp", "head"), [("mtp", 2, "parallel"), ("mtp", 4, "gather"), ("msp", 4, "parallel"), ("fsp", 2, "gather")]
)
def test_shapes_of_tensor_parallelism(name: str, tp: int, head: str) -> None:
    """The page's section "Data Procedure in MTP/MSP/FSP parallelism", and its partition of weights."""
    kv = 4
    qkv, heads = HIDDEN + 2 * DIM * kv, HEADS // tp
    hidden = (1, TOKENS if name == "mtp" else TOKENS // tp, HIDDEN)
    expected = _parameters(HIDDEN + 2 * DIM * kv, tp, column=True) | _attention(
        TOKENS, heads, kv // tp, heads, kv // tp
    )
    expected |= {
        "input_ids": (1, TOKENS),
        "embedding in": (1, TOKENS),
        "layers.0.attention.wo in": (1, TOKENS, HIDDEN // tp),
        "head in": hidden,
        "head out": (1, TOKENS, VOCAB // tp if head == "parallel" else VOCAB),
    }
    columns: Shapes = {"attention.wqkv": (qkv // tp,), "mlp.w1": (FFN // tp,), "mlp.w3": (FFN // tp,)}
    expected |= _module_outputs(TOKENS, columns, hidden)
    _holds(Case.parse(f"mode={name} tp={tp} kv_heads={kv} head={head} {COMMON}"), expected)


@pytest.mark.parametrize(
    ("mesh", "kv", "head"),
    [("tp=2 wp=2", 4, "exchange"), ("tp=2 dp=2 wp=4", 2, "local"), ("tp=4 wp=2", 2, "gather"), ("tp=4", 1, "exchange")],
)
def test_shapes_of_weight_parallelism(mesh: str, kv: int, head: str) -> None:
    """The page's section "Data Procedure in ISP parallelism"; tp is its sp_size, and wp_size another number."""
    case = Case.parse(f"mode=isp {mesh} kv_heads={kv} head={head} {COMMON}")
    sp, wp = case.tp, case.wp
    qkv, own = HIDDEN + 2 * DIM * kv, TOKENS // sp
    hidden = (1, own, HIDDEN)
    logits = {"exchange": (1, TOKENS, VOCAB // sp), "local": (1, own, VOCAB), "gather": (1, TOKENS, VOCAB)}
    expected = _parameters(qkv, wp, column=False) | _attention(own, HEADS, kv, HEADS // sp, max(kv, sp) // sp)
    expected |= {
        "input_ids": (1, own),
        "embedding in": (1, own),
        "layers.0.attention.wo in": (1, own, HIDDEN),
        "head in": hidden,
        "head out": logits[head],
    }
    columns: Shapes = {"attention.wqkv": (qkv,), "mlp.w1": (FFN,), "mlp.w3": (FFN,)}
    expected |= _module_outputs(own, columns, hidden)
    _holds(case, expected)
