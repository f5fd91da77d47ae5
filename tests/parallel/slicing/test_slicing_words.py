"""The words of a slice and what follows. Two ranks of an OPT layer by hand: tests/reports/commands/test_slicing.py."""

import pytest
import torch

from shardproof.parallel.slicing.rows import widths
from shardproof.parallel.slicing.slices import slices
from shardproof.parallel.slicing.words import FAMILIES, Sliced
from shardproof.reference.errors import CaseError
from tests.parallel.slicing.laws import broken_by, check_round_trip

CONTAINER = "family=opt hidden=48 heads=12"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("family=gpt5", f"family=gpt5: is not a known word; legal: {'|'.join(FAMILIES)}"),
        ("mode=tp", "mode=tp: is not a word of a slice; legal: one of preset family hidden heads"),
        ("hidden=x", "hidden=x: must be a whole number; legal: hidden=1"),
        ("tp=0", "tp=0: must be at least 1; legal: tp=1"),
        ("heads=10", "heads=10: must divide hidden=768 unless head_dim is given"),
        ("heads=12 kv_heads=5", "kv_heads=5: must divide heads=12"),
        ("family=bloom path=container", "path=container: has no container of family=bloom; legal: path=autotp"),
        ("family=opt spare=empty", "spare=empty: is a choice of path=autotp; legal: spare=refuse"),
        ("family=opt path=autotp tp=16", "kv_heads=12: leaves a rank of tp=16 without a head; legal: tp=12, or spare="),
        ("family=llama ffn=2 tp=4", "ffn=2: leaves rank 2 of 4 with nothing; legal: ffn=4"),
        ("preset=gpt3-857m", "preset=gpt3-857m: is not a known word; legal: llama3-8b|llama3-70b|llama3-405b|opt-125m"),
        ("family=codegen heads=4 hidden=16 tp=2", "heads=2: on a rank must be equal to kv_heads and a multiple"),
        ("family=yuan heads=6 hidden=24 tp=2", "heads=6: must be kv_heads and an even number for each of tp=2"),
        ("bias=maybe", "bias=maybe: must be true or false"),
        # DeepSpeed's // would drop heads or features, or give a rank half a head.
        (f"{CONTAINER} tp=5", "heads=12: must be a multiple of tp=5: a container gives every rank"),
        (f"{CONTAINER} tp=4 kv_heads=6", "kv_heads=6: must be a multiple of tp=4: a container gives every rank"),
        (f"{CONTAINER} tp=4 ffn=62", "ffn=62: must be a multiple of tp=4: a container gives every rank"),
    ],
)
def test_what_cannot_be_is_refused_with_its_rule(text: str, message: str) -> None:
    with pytest.raises(CaseError) as caught:
        slices(Sliced.parse(text))
    assert str(caught.value).startswith(message)
    assert "; legal: " in str(caught.value)


def test_what_follows_from_what() -> None:
    opt = Sliced.parse("family=opt hidden=768 heads=12 tp=2")
    assert (opt.kv_heads, opt.head_dim, opt.ffn, opt.vocab) == (12, 64, 3072, 50272)
    assert opt.bias and opt.path == "container"
    llama = Sliced.parse("preset=llama3-8b tp=8")
    assert (llama.hidden, llama.heads, llama.kv_heads, llama.ffn, llama.path) == (4096, 32, 8, 14336, "autotp")
    assert not llama.bias
    bigcode = Sliced.parse("family=bigcode hidden=64 heads=8 tp=4")
    assert (bigcode.kv_heads, bigcode.spare) == (1, "replicate")
    assert Sliced.parse("preset=opt-125m tp=4").attention.fused == 2304
    assert [word.name for word in Sliced.meanings()][:3] == ["preset", "family", "hidden"]


def shapes(family: str, tp: int) -> str:
    """Small sizes that this family can cut."""
    heads = {"codegen": 4 * tp, "yuan": 2 * tp}.get(family, 2 * tp if family == "bigcode" else tp + 1)
    return (
        f"family={family} hidden={4 * heads} heads={heads} ffn={8 * tp + 3} vocab=37 positions=11 tp={tp} path=autotp"
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_keeps_its_laws(family: str) -> None:
    for tp, head in ((1, "sum"), (2, "gather"), (3, "sum"), (4, "gather")):
        model = Sliced.parse(f"{shapes(family, tp)} head={head}")
        found = slices(model)
        assert len({one.name for one in found}) == len(found)
        for one in found:
            assert broken_by(one, model) == [], one.name
            check_round_trip(torch.randn(one.place.shape), one.place, tp)
        by_role = {
            linear.role: one
            for linear in FAMILIES[family].linears
            for one in found
            if one.name == f"{linear.name}.weight"
        }
        inner = widths(by_role["down"].place.cuts[0].held)
        ups = [by_role[role] for role in ("up", "gate_up") if role in by_role]
        assert ups
        for up in ups:
            assert widths(up.place.cuts[0].held) == tuple(width * (1 + ("gate_up" in by_role)) for width in inner)
        assert sum(inner) == model.ffn


def test_a_bias_follows_its_rows_or_is_added_once() -> None:
    found = {one.name: one for one in slices(Sliced.parse("family=opt heads=12 tp=5 path=autotp"))}
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "fc1"):
        held = found[f"{name}.bias"].place.cuts[0].held
        assert held == found[f"{name}.weight"].place.cuts[0].held and widths(held)[0] > widths(held)[-1]
    for name in ("self_attn.out_proj", "fc2"):
        assert found[f"{name}.weight"].place.cuts[0].dim == 1
        assert found[f"{name}.bias"].place.cuts == () and "added once" in found[f"{name}.bias"].rule


def test_kv_heads_that_are_copied_are_counted() -> None:
    model = Sliced.parse("family=llama hidden=64 heads=8 kv_heads=2 tp=4 spare=replicate")
    found = {one.name: one for one in slices(model)}
    assert found["self_attn.k_proj.weight"].copied == 2 * 8 and found["self_attn.q_proj.weight"].copied == 0
    assert all(broken_by(one, model) == [] for one in found.values())
    container = Sliced.parse("family=opt hidden=48 heads=12 kv_heads=6 ffn=60 vocab=30 tp=3")
    assert container.path == "container" and all(broken_by(one, container) == [] for one in slices(container))
    bigcode = slices(Sliced.parse("family=bigcode hidden=64 heads=8 tp=4"))[0]
    assert bigcode.copied == 2 * 3 * 8 and widths(bigcode.place.cuts[0].held) == (32, 32, 32, 32)


def test_ranks_without_a_head_are_a_choice() -> None:
    model = Sliced.parse("family=llama hidden=64 heads=8 kv_heads=2 tp=4 spare=empty")
    found = {one.name: one for one in slices(model)}
    assert widths(found["self_attn.q_proj.weight"].place.cuts[0].held) == (32, 32, 0, 0)
    assert all(broken_by(one, model) == [] for one in found.values())
