"""Tests of model/transformer. Every tensor shape that InternEvo's page "Data Load and Procedure" prints for the forward
pass, on a real run.

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

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardproof.parallel.communication.batch import deliver
from shardproof.parallel.communication.layout import Mesh
from shardproof.parallel.layers.attention import Attention, Core
from shardproof.parallel.subject import scheme_of
from shardproof.parallel.training import set_up
from shardproof.reference.case import Case
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


def _hook(model: nn.Module, notes: Shapes) -> None:
    """Note every module's first input and its output, and what attention's exchange gets, gives and hands its core."""

    def note(name: str, _module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        notes[f"{name} in"], notes[f"{name} out"] = tuple(getattr(args[0], "shape", ())), tuple(output.shape)

    for name, module in model.named_modules():
        if name:
            module.register_forward_hook(partial(note, name))
    attention = model.get_submodule("layers.0.attention")
    assert isinstance(attention, Attention)
    attention.exchange = partial(_noted_exchange, notes, attention.exchange)


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
        _hook(state.model, notes)
        state.model(batch)
        return {**notes, "input_ids": tuple(batch.tokens.shape), "label": tuple(batch.labels.shape)}

    return on_ranks(case.world_size, program)


def _parameters(case: Case) -> Shapes:
    """In parts over tp, or over wp in isp: `wo` and `w2` by columns, in isp by rows as all others; norms are whole."""
    isp = case.mode == "isp"
    parts, qkv = case.wp if isp else case.tp, HIDDEN + 2 * DIM * case.kv_heads
    rows, columns = (parts, 1) if isp else (1, parts)
    layer = {"attention.wqkv": (qkv // parts, HIDDEN), "attention.wo": (HIDDEN // rows, HIDDEN // columns)}
    layer |= dict.fromkeys(("mlp.w1", "mlp.w3"), (FFN // parts, HIDDEN)) | {"mlp.w2": (HIDDEN // rows, FFN // columns)}
    norms: Shapes = dict.fromkeys(("layers.0.attention_norm", "layers.0.mlp_norm", "final_norm"), (HIDDEN,))
    tables = {"embedding.tokens": (VOCAB, HIDDEN // parts), "head": (VOCAB // parts, HIDDEN)}
    every = {**{f"layers.0.{name}": shape for name, shape in layer.items()}, **norms, **tables}
    return {f"{name}.weight": shape for name, shape in every.items()}


def _activations(case: Case) -> Shapes:
    """Of hidden states, of linears and of attention, whose core has whole rows.

    Tensor parallelism splits the features of linears, which see whole rows; isp splits the tokens and no feature.
    """
    tp, kv = case.tp, case.kv_heads
    own = TOKENS if case.mode == "mtp" else TOKENS // tp
    parts, tokens = (1, own) if case.mode == "isp" else (tp, TOKENS)
    layer = ("attention_norm", "attention.wo", "attention", "mlp_norm", "mlp.w2", "mlp")
    states = ["embedding", *(f"layers.0.{name}" for name in layer), "layers.0", "final_norm"]
    found: Shapes = dict.fromkeys((*(f"{name} out" for name in states), "head in"), (1, own, HIDDEN))
    columns = {"attention.wqkv": HIDDEN + 2 * DIM * kv, "mlp.w1": FFN, "mlp.w3": FFN}
    found |= {f"layers.0.{name} out": (1, tokens, features // parts) for name, features in columns.items()}
    found |= {"layers.0.attention.wo in": (1, tokens, HIDDEN // parts), "kv": (1, tokens, 2, kv // parts, DIM)}
    found |= dict.fromkeys(("q", "context"), (1, tokens, HEADS // parts, DIM))
    found |= dict.fromkeys(("k", "v"), (1, tokens, kv // parts, DIM))
    found |= dict.fromkeys(("core q", "core context"), (1, TOKENS, HEADS // tp, DIM))
    found |= {"core kv": (1, TOKENS, 2, max(kv, tp) // tp, DIM), "label": (1, TOKENS)}
    logits = {"gather": (TOKENS, VOCAB), "local": (own, VOCAB)}.get(case.head, (TOKENS, VOCAB // tp))
    return found | dict.fromkeys(("input_ids", "embedding in"), (1, tokens)) | {"head out": (1, *logits)}


@pytest.mark.parametrize(
    "words",
    [
        "mode=mtp tp=2 kv_heads=4 head=parallel",
        "mode=mtp tp=4 kv_heads=4 head=gather",
        "mode=msp tp=4 kv_heads=4 head=parallel",
        "mode=fsp tp=2 kv_heads=4 head=gather",
        "mode=isp tp=2 wp=2 kv_heads=4 head=exchange",
        "mode=isp tp=2 dp=2 wp=4 kv_heads=2 head=local",
        "mode=isp tp=4 wp=2 kv_heads=2 head=gather",
        "mode=isp tp=4 kv_heads=1 head=exchange",
    ],
)
def test_shapes_are_those_of_the_page(words: str) -> None:
    """The sections "Data Procedure in MTP/MSP/FSP parallelism" and "in ISP parallelism", where tp is the sp_size."""
    case = Case.parse(f"{words} {COMMON}")
    expected = _parameters(case) | _activations(case)
    for rank, found in enumerate(_run(case)):
        assert {name: found.get(name) for name in expected} == expected, rank
