"""Layouts for the tests of checkpoints: one model in many layouts, and ranks that save and load it."""

import random
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from parallel.checkpoints.loading import load
from parallel.checkpoints.saving import save
from parallel.communication.mesh import Mesh
from parallel.model.strategy import Rank
from parallel.registry import strategy_of
from parallel.subject import subject
from parallel.training.loop import set_up
from reference.case import Case, CaseError
from reference.checkpoints.stored import stored
from tests.parallel.ranks import CPU, on_ranks

MODEL = "layers=2 heads=12 kv_heads=6 hidden=48 ffn=42 vocab=389 seq=24 batch=2 lr=0.1"
_WAYS = tuple(
    f"mode={mode} tp={tp} cp={cp} dp={dp} pp={pp} micro={6 // dp}"
    for mode in ("tp", "tp-sp", "mtp", "msp", "fsp", "isp", "autotp")
    for tp in (1, 2, 3, 6)
    for cp in (1, 2)
    for dp in (1, 2, 3)
    for pp in (1, 2)
    if 1 < tp * cp * dp * pp <= 6
)
_SHARED = (
    "",
    "bucket=700",
    "zero=1",
    "zero=1 bucket=700",
    "zero=2",
    "zero=3",
    "wp=2",
    "wp=3",
    "embedding=hidden",
    "zero=3 shard=1",
)


@st.composite
def models(draw: st.DrawFn) -> str:
    """Words of one model and its training that every mode can have."""
    words = [f"tied={draw(st.sampled_from(('true', 'false')))}", f"fuse_qkv={draw(st.sampled_from(('true', 'false')))}"]
    words.append(draw(st.sampled_from(("activation=gelu", "activation=swiglu", "activation=swiglu fuse_mlp=true"))))
    words.append(draw(st.sampled_from(("norm=layernorm bias=true", "norm=rmsnorm bias=false", "qk_norm=true"))))
    words.append(draw(st.sampled_from(("optimizer=adamw", "optimizer=adamw", "optimizer=sgd"))))
    return " ".join([MODEL, *words])


@st.composite
def layouts(draw: st.DrawFn, model: str) -> Case:
    """A legal layout of the model, on 2 to 6 ranks, every one with the same batch in a step."""
    chosen = random.Random(draw(st.integers(0, 2**20)))
    while True:
        try:
            return Case.parse(f"{model} {chosen.choice(_WAYS)} {chosen.choice(_SHARED)}")
        except CaseError:
            continue  # these words do not go together


def begun(case: Case) -> tuple[Rank, torch.optim.Optimizer]:
    """This rank of a case before its first step."""
    rank = set_up(case, strategy_of(case), Mesh.of(case), CPU)
    return rank, rank.step.optimizer(rank)


def relaid(case: Case, source: Path, target: Path) -> None:
    """Load a checkpoint into the ranks of this case, and save it again."""

    def program(_: int) -> None:
        rank, optimizer = begun(case.but(save=str(target)))
        save(rank, optimizer, target, steps=load(rank, optimizer, source))

    on_ranks(case.world_size, program)


def trained(case: Case) -> list[dict[str, Any]]:
    """The outcomes of all ranks."""
    return on_ranks(case.world_size, lambda _: subject(case, CPU))


def full_tensors(folder: Path) -> dict[str, Tensor]:
    """Tensors of a checkpoint by torch's own loader, without those that belong to the layout."""
    found = stored(Case.of(load=str(folder)))
    return {key: tensor for key, tensor in found.items() if key != "train.ranks"}
