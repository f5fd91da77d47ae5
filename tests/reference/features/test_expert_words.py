"""The words of experts: how ranks of experts are numbered, and that a case with experts reads back."""

from reference.case import Case


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
