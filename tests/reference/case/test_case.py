"""The case: its text round-trips in the fewest words, presets and followers, mesh and padded vocabulary."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof.reference.case import Case, CaseError
from shardproof.reference.case.case import PRESETS
from shardproof.reference.case.variants import VARIANTS, lack
from shardproof.reference.language.core import MODES, mlp_width
from shardproof.reference.training import truth as module
from shardproof.reference.training.truth import SPLIT, dense_case, truth
from shardproof.suites.drawing.strategies import cases


@st.composite
def any_case(draw: st.DrawFn) -> Case:
    """A case of any mode, with words that no strategy of the suites varies."""
    case = draw(st.sampled_from(tuple(MODES)).flatmap(cases))
    words: dict[str, Any] = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "lr": st.floats(1e-9, 1e9),
                "clip": st.floats(0, 10),
                "dtype": st.sampled_from(("float64", "float32", "bfloat16")),
                "optimizer": st.sampled_from(("sgd", "adamw")),
                "data": st.sampled_from(("", "a=b.txt", "/tmp/x.jsonl")),
            },
        )
    )
    shown = [name for name in VARIANTS if not lack(dataclasses.asdict(case) | {"variant": name})]
    return case.but(**words, variant=draw(st.sampled_from(("", *shown))))


@settings(max_examples=60, deadline=None)
@given(case=any_case(), order=st.randoms(use_true_random=False))
def test_text_parses_back_in_any_order_and_without_no_word(case: Case, order: Any) -> None:
    again, words = Case.parse(str(case)), str(case).split()
    assert again == case and hash(again) == hash(case) and str(again) == str(case)
    for word in words:
        shorter = " ".join(other for other in words if other != word)
        try:
            assert Case.parse(shorter) != case, word
        except CaseError:
            continue  # without the word there is no such case
    order.shuffle(words)
    assert Case.parse(" ".join(words)) == case


def test_later_words_override_earlier_ones_and_no_word_is_the_default() -> None:
    assert Case.parse("tp=4 kv_heads=4 tp=2") == Case.of(tp=2, kv_heads=4)
    assert str(Case()) == "" and Case.parse("") == Case() == Case.of()


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_a_case_and_prints_its_name_alone(preset: str) -> None:
    case = Case.of(preset=preset)
    assert str(case) == ("" if preset == "tiny-gpt" else f"preset={preset}")
    for key, value in PRESETS[preset].items():
        assert getattr(case, key) == value
    assert case.but(seed=1).preset == preset


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("hidden=96 heads=8", "ffn", 384),
        ("activation=swiglu hidden=64", "ffn", 176),
        ("preset=tiny-internlm2 hidden=128", "ffn", 344),
        ("heads=4", "kv_heads", 4),
        ("mode=isp tp=2 dp=2", "wp", 2),
        ("mode=mtp tied=false", "embedding", "hidden"),
        ("mode=mtp tied=true", "embedding", "vocab"),
        ("mode=tp-sp", "embedding", "vocab"),
        ("mode=isp", "head", "exchange"),
        ("mode=msp", "delivery", "local"),
        ("family=internlm2 vocab=264", "norm", "rmsnorm"),
        ("family=llama norm=layernorm vocab=264", "norm", "layernorm"),
        ("vocab=50257 tp=4 kv_heads=8", "padded_vocab", 50688),
        ("vocab=50257 tp=1", "padded_vocab", 50304),
        ("vocab=256 tp=2", "padded_vocab", 256),
        ("mode=isp tp=2 dp=3 wp=3 hidden=48 heads=8 ffn=48 vocab=769", "padded_vocab", 2 * 128 * 6),
        ("preset=tiny-internlm2", "padded_vocab", 264),
    ],
)
def test_what_follows_from_other_words(text: str, key: str, value: object) -> None:
    """Vocabularies of gpt are padded to a multiple of 128 for each rank that splits logits or weights; others never."""
    assert getattr(Case.parse(text), key) == value


def test_mlp_widths_are_those_of_the_published_models() -> None:
    assert mlp_width(4096, 3.5, 256) == 14336
    assert mlp_width(2048, 4.0, 256) == 8192
    assert mlp_width(6144, 8 / 3, 256) == 16384


@pytest.mark.parametrize(
    ("text", "axis"),
    [
        ("tp=1 cp=4 cp_comm=alltoall-ring cp_inner=2 seq=16 micro=3", "cp"),
        ("cp=2 cp_slices=contiguous cp_comm=gather micro=3", "cp"),
        ("pp=2 layers=4 schedule=interleaved chunks=2 group=3 micro=3", "pp"),
        ("pp=2 layers=4 schedule=gpipe first_layers=3 micro=3", "pp"),
    ],
)
def test_words_about_several_ranks_leave_with_them(text: str, axis: str) -> None:
    """If they are given again, the case breaks a rule."""
    case = Case.parse(text)
    word = "cp_comm" if axis == "cp" else "schedule"
    alone = case.but(**{axis: 1})
    assert str(alone).split() == [w for w in text.split() if w.split("=")[0] in ("tp", "layers", "seq", "micro")]
    with pytest.raises(CaseError, match="and .p=1 has one"):
        case.but(**{axis: 1, word: "gather" if axis == "cp" else "gpipe"})


CPU = torch.device("cpu")


def computes_the_same(case: Case) -> bool:
    """Whether the dense model computes the same names and bits of a case and of what stands for it."""
    own, shared = truth(case, CPU), truth(dense_case(case), CPU)
    return own.keys() == shared.keys() and all(torch.equal(own[name], shared[name]) for name in own)


@given(st.sampled_from(tuple(MODES)).flatmap(lambda mode: cases(mode, layers=1, micro=2, steps=2)))
def test_what_stands_for_a_case_has_its_truth(case: Case) -> None:
    assert computes_the_same(case)


def test_modes_and_meshes_of_one_model_are_one_case() -> None:
    words = "family=llama hidden=96 heads=24 kv_heads=8 ffn=28 vocab=268 dp=2 lr=0.1"
    texts = (f"mode={mode} {words}" for mode in ("mtp", "msp", "fsp"))
    others = (f"mode=isp {words} tp=4 wp=2 head=gather overlap=false", f"mode=tp {words} recompute=full delivery=flat")
    assert len({dense_case(Case.parse(text)) for text in (*texts, *others)}) == 1


@pytest.mark.parametrize("text", ["dp=2", "seed=1", "clip=0.1", "metric=true", "fuse_qkv=false", "optimizer=adamw"])
def test_other_words_make_another_case(text: str) -> None:
    assert dense_case(Case.parse(text)) != dense_case(Case.parse(""))


def test_data_that_depend_on_the_split_keep_the_case() -> None:
    case = Case.parse("family=llama vocab=297 tp=9 heads=18 kv_heads=9 hidden=36 ffn=36")
    assert dense_case(case) == case
    needs_its_mode = Case.parse("mode=msp variant=norm-average")
    assert dense_case(needs_its_mode) == needs_its_mode


@pytest.mark.parametrize("word", ["positions=learned", "tied=true", "label_smoothing=0.0", "dp=1"])
def test_a_word_too_many_is_seen(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case.parse("mode=isp family=llama ffn=64 vocab=268 dp=2 label_smoothing=0.1 lr=0.1 layers=1")
    assert computes_the_same(case)
    name, _, value = word.partition("=")
    monkeypatch.setattr(module, "SPLIT", {**SPLIT, name: getattr(Case.parse(word), name)})
    assert not computes_the_same(case)
