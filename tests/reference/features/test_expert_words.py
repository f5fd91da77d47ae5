"""The words of experts: what is refused and what is legal instead, and how ranks of experts are numbered."""

from __future__ import annotations

import pytest

from reference.case import Case, CaseError

REFUSED = (
    ("ep=2", "ep=2: is about experts, and experts=0 has none; legal: ep=1"),
    ("experts=1", "experts=1: is 0, or at least 2 to choose from; legal: experts=2"),
    ("experts=8 ep=3 tp=1 dp=3", "experts=8: must be a multiple of ep=3; legal: experts=9"),
    ("mode=autotp experts=8", "experts=8: mode=autotp has none; layers of mode=tp|tp-sp|mtp|msp|fsp|isp may have them"),
    ("mode=autotp experts=8", "experts=8: mode=autotp has none"),
    ("experts=8 top_k=9", "top_k=9: must be at most experts=8; legal: top_k=8"),
    ("experts=8 top_k=1", "router=softmax: gives the only chosen expert the weight 1"),
    ("experts=8 dtype=float32", "routing=learned: compares choices exactly, and rounding in dtype=float32"),
    ("experts=8 ep=4", "ep=4: ep*etp=8 must divide the 2 ranks of a stage; legal: ep=2"),
    ("experts=8 etp=4", "etp=4: ep*etp=4 must divide the 2 ranks of a stage; legal: etp=2"),
    ("experts=8 etp=2 expert_ffn=7", "expert_ffn=7: must be a multiple of etp=2; legal: expert_ffn=8"),
    ("experts=8 shared_ffn=7", "shared_ffn=7: must be a multiple of tp=2; legal: shared_ffn=8"),
    ("experts=8 shared_gate=true", "shared_gate=true: is for a shared expert, and shared_ffn=0 has none"),
    ("experts=8 dense_layers=2", "dense_layers=2: leaves none of layers=2 to experts; legal: dense_layers=0"),
    ("experts=8 mode=tp seq=31", "seq=31: each of tp=2 ranks sends an equal part of the 31 tokens of a row"),
    ("experts=8 bias_rate=0.1", "bias_rate=0.1: is added to sigmoids, and router=softmax has none"),
    ("experts=8 router=sigmoid bias_rate=0.1 routing=one", "bias_rate=0.1: changes what the router chooses"),
    ("experts=8 skew=0.25", "skew=0.25: is a share of equal loads, and routing=learned has others; legal: skew=0.0"),
    ("experts=8 routing=equal skew=0.3", "skew=0.3: must be a number of 16ths from 0 to 1; legal: skew=0.25"),
    ("experts=8 routing=equal skew=1.5", "skew=1.5: must be a number of 16ths from 0 to 1; legal: skew=0.25"),
    ("experts=8 pad=true", "pad=true: is about rows beyond a capacity, and capacity=0.0 takes all"),
    ("experts=8 capacity=1 pad=true dispatcher=allgather", "pad=true: is about rows, and dispatcher=allgather sends"),
    ("experts=8 capacity=1 routing=one dtype=bfloat16", "drop=score: compares weights exactly"),
    ("experts=8 router_groups=3", "router_groups=3: must divide experts=8; legal: router_groups=1"),
    ("experts=8 router_groups=4 kept_groups=1 top_k=3", "kept_groups=1: of 4 groups must share top_k=3 evenly"),
    ("experts=8 aux_loss=-1", "aux_loss=-1.0: must be 0 or a positive number; legal: aux_loss=0.0"),
    (
        "experts=8 zero=2 dp=4 shard=2",
        "shard=2: shares parameters among ranks of dp, and experts have copies on others",
    ),
    ("experts=8 init=shard", "init=shard: draws dense weights alone"),
    ("experts=8 dp=2 ep=2 order=tp-dp", "order=tp-dp: must name ep, whose size is 2 (where experts are numbered)"),
    ("experts=8 dp=2 pp=2 etp=1 ep=2 order=tp-pp-ep-dp", "order=tp-pp-ep-dp: numbers other stages for experts"),
)


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=[words for words, _ in REFUSED])
def test_what_is_refused_has_a_legal_value(words: str, message: str) -> None:
    with pytest.raises(CaseError) as raised:
        Case.parse(f"mode=tp-sp tp=2 {words}")
    assert message in str(raised.value)


def test_ranks_of_experts_are_numbered_as_by_megatron() -> None:
    """rank = etp_r + etp*(ep_r + ep*(edp_r + edp*pp_r)), and the same ranks by tp, cp and dp (experts.md, head)."""
    case = Case.parse("mode=tp-sp tp=2 cp=2 dp=2 pp=2 layers=2 etp=1 ep=4 experts=8 seq=32")
    assert case.world_size == 16 and case.axis_sizes["edp"] == 2
    for rank in range(16):
        etp, ep, edp, pp = (case.axis_rank(axis, rank) for axis in ("etp", "ep", "edp", "pp"))
        assert rank == etp + 1 * (ep + 4 * (edp + 2 * pp))
    assert case.axes["etp_ep"][0] == (0, 1, 2, 3) and case.axes["tp"][0] == (0, 1)


def test_an_order_numbers_experts_too() -> None:
    case = Case.parse("mode=tp-sp tp=2 dp=4 etp=2 ep=2 experts=8 order=dp-tp-ep")
    assert case.axes["tp"][0] == (0, 4) and case.axes["edp"][0] == (0, 1)
    assert case.axes["etp"][0] == (0, 2) and case.axes["ep"][0] == (0, 4)


def test_experts_are_words_of_a_case_that_reads_back() -> None:
    words = "mode=tp-sp ep=2 etp=1 experts=8 routing=skewed"
    assert str(Case.parse(words)) == words
    assert Case.parse(words).but(experts=0, ep=1, etp=0, routing="learned").layers_with_experts == ()
