"""Every rule of a case, broken once: the message names key, value, rule and a legal value that really is legal."""

import ast
import inspect
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof.reference.case import Case, CaseError
from shardproof.reference.case.case import FAMILIES, PRESETS
from shardproof.reference.case.domains import domains
from shardproof.reference.features import FEATURES
from shardproof.reference.language import rules
from shardproof.reference.language.core import MODES
from shardproof.reference.language.words import write
from shardproof.suites.drawing.strategies import cases

LATENT = "kv_lora_rank=12 positions=rope kv_heads=8"
OF_PARTS = {
    "experts=1": "is 0, or at least 2 to choose from",
    "mode=autotp experts=8": "mode=autotp has none; layers of mode=tp|tp-sp|mtp|msp|fsp|isp may have them",
    "mode=isp experts=8 recompute=full": "computes experts again before the weights of their layer are gathered"
    " in mode=isp",
    "experts=8 dense_layers=2": "leaves none of layers=2 to experts",
    "experts=4 top_k=5": "must be at most experts=4",
    "experts=8 top_k=1": "gives the only chosen expert the weight 1, and the router no gradient (top_k=1)",
    "experts=8 router_scale=0.0": "must be a positive number",
    "experts=8 global_loss=0.1": "counts tokens of other data ranks, whose choices the dense model has not made yet"
    " (routing=learned)",
    "experts=8 capacity=1.0 pad=true capacity_of=micro-batch": "has every rank send as many rows, and"
    " capacity_of=micro-batch lets ranks compete",
    "experts=8 balance_of=counted": "is about balance losses, and the case has none",
    "experts=8 balance_of=counted global_loss=0.1 routing=equal": "is of aux_loss and z_loss; sequence_loss and"
    " global_loss are of all",
    "experts=8 skew=0.25": "is a share of equal loads, and routing=learned has others",
    "experts=8 routing=equal skew=0.3": "must be a number of 16ths from 0 to 1",
    "experts=8 capacity=-1.0": "must be 0 or a positive number",
    "experts=8 dtype=float32": "compares choices exactly, and rounding in dtype=float32 makes other ones",
    "experts=8 shared_gate=true": "is for a shared expert, and shared_ffn=0 has none",
    "experts=8 routing=skewed router_dtype=float32": "must not be narrower than dtype=float64",
    "experts=8 router_groups=3": "must divide experts=8",
    "experts=8 router_groups=2 kept_groups=4": "of 2 groups must share top_k=2 evenly, at most 4 a group",
    "experts=8 routing=skewed router_groups=2": (
        "changes what the router chooses, and routing=skewed leaves it no choice"
    ),
    "experts=8 bias_rate=0.1": "is added to sigmoids, and router=softmax has none",
    "experts=8 router=sigmoid bias_rate=0.1 save=x": "changes a bias that no checkpoint of save= holds",
    "experts=8 pad=true": "is about rows beyond a capacity, and capacity=0.0 takes all",
    "experts=8 capacity=1.0 routing=skewed dtype=float32": (
        "compares weights exactly, and rounding in dtype=float32 makes others the smallest"
    ),
    "experts=8 capacity=1.0 pad=true dispatcher=allgather": "is about rows, and dispatcher=allgather sends none",
    "experts=8 expert_ffn=15": "must be a multiple of etp=2",
    "experts=8 shared_ffn=15": "must be a multiple of tp=2",
    "experts=6 ep=3 tp=2": "ep*etp=6 must divide the 2 ranks of a stage",
    "experts=8 seq=15": "each of tp=2 ranks sends an equal part of the 15 tokens of a row that it holds",
    "experts=8 order=tp-dp ep=2 dp=2": "must name ep, whose size is 2 (where experts are numbered)",
    "experts=8 init=shard": "draws dense weights alone, and layers with experts have others",
    "experts=8 recompute=full early_stop=true": "is not implemented for layers with experts",
    "experts=8 zero=2 dp=4 shard=2": "shares parameters among ranks of dp, and experts have copies on others",
    "top_k=3": "is about experts, and experts=0 has none",
    "kv_lora_rank=-1": "must not be negative",
    "q_lora_rank=8": "is about latent attention, and kv_lora_rank=0 has none",
    "mode=mtp kv_lora_rank=12": "mode=mtp has no latent attention (mode=tp|tp-sp)",
    f"{LATENT} qk_rope_dim=3": "rope rotates pairs",
    "kv_lora_rank=12 positions=rope heads=8 kv_heads=2": "latent attention has a key and a value for each of heads=8",
    f"{LATENT} qk_norm=true": ("is of each head, and latent attention has norms of its latents"),
    f"{LATENT} latent_down=column q_lora_rank=7": ("must be a multiple of tp=2 (latent_down=column)"),
    "kv_lora_rank=13 positions=rope kv_heads=8 latent_down=column": (
        "with qk_rope_dim=4 must be a multiple of tp=2 (latent_down=column)"
    ),
    f"{LATENT} cp=2 seq=8 v_head_dim=13": "must be at most 12, as wide as the key that context ranks exchange with it",
    "experts=8 dropout=0.1 random=stateful": (
        "draws masks that ranks alone know, and choices of the router, whose rows are sent, follow them"
    ),
    "prediction_depth=-1": "must not be negative",
    "prediction_depth=1 prediction_weight=-1.0": "must be 0 or a positive number",
    "prediction_weight=0.5": "weighs the loss of further tokens, and prediction_depth=0 predicts none",
    "prediction_depth=40": "must be below seq=32",
    "prediction_depth=1 pp=2": "predicts on the last pipeline stage, and the table of positions is on the first",
    "mode=isp tied=false prediction_depth=1": "mode=isp predicts no further tokens (mode=tp|tp-sp)",
    "experts=7 ep=2 dp=2": "must be a multiple of ep=2",
    "kv_lora_rank=12 kv_heads=8": "latent attention has rotary keys beside its latent",
    "experts=8 dense_layers=-1": "must not be negative",
    "experts=8 pp=2 dp=2 ep=2 etp=1 order=tp-pp-dp-ep": (
        "numbers other stages for experts than for dense weights; pp last does not"
    ),
}
"""Text that breaks a rule of experts, latent attention or further predictions -> the rule."""
ISP = "mode=isp tied=false "
BROKEN = {
    **OF_PARTS,
    "seed=18446744073709551616": "must be below 2**64, for torch's generators take no more",
    "mode=ring": "is not a known word",
    "tp=0": "must be at least 1",
    "layers=-1": "must be at least 1",
    "steps=0": "must be at least 1",
    "micro=0": "must be at least 1",
    "seed=-1": "must not be negative",
    f"steps={'9' * 64}": "must be at most 2147483647",
    "heads=6 kv_heads=2": "must divide hidden=64",
    "hidden=100 positions=rope": "must divide hidden=100",
    "heads=8 kv_heads=6": "must divide heads=8",
    "heads=16 kv_heads=12 tp=4": "must divide heads=16",
    "hidden=72 positions=rope": "rope rotates pairs, so hidden/heads must be even",
    "fuse_mlp=true": "fuses gate and up projection, which only swiglu has",
    "preset=tiny-internlm2 delivery=flat": "Megatron's broadcasts know no packs",
    "mode=mtp packed=true": "packs restart positions inside a row, which needs rotary positions",
    "cp_comm=gather": "is about context ranks, and cp=1 has one",
    "mode=autotp cp=2": "mode=autotp has no context parallelism",
    "mode=mtp cp=2 metric=true": "is summed over tp alone, and context ranks hold other tokens",
    "cp=2 dp=2 zero=2 shard=2": "shares parameters among data ranks, and with cp=2 context ranks are among them",
    "mode=tp-sp cp=2 seq=12": "mode=tp-sp with cp=2 and cp_slices=zigzag cuts a row into 8 equal parts",
    "cp=3 seq=33": "mode=tp with cp=3 and cp_slices=zigzag cuts a row into 6 equal parts",
    "cp=4 cp_comm=alltoall-ring": "must divide cp=4 and be neither 1 nor all of it",
    "cp=4 cp_inner=2": "cp_comm=ring has one level",
    "cp=8 cp_comm=alltoall": "the 4 of a rank must be a multiple of the 8 ranks that exchange them",
    "cp=2 cp_comm=alltoall heads=12 kv_heads=6 hidden=48": "the 3 of a rank must divide the 2 ranks that exchange "
    "them, or be a multiple",
    "order=tp-xp-dp": "'xp' is not an axis",
    "mode=isp pp=2 order=pp-tp": "must end in pp: mode=isp splits the weights of a stage over neighbouring ranks",
    "pp=2 zero=2": "a stage of pp=2 keeps whole gradients of all its micro-batches, and sums them once (zero=2)",
    "pp=4": "must share evenly over 4 stages, unless first_layers= or last_layers= is given",
    "pp=3 first_layers=1 last_layers=1": "leaves none to pipeline ranks [1] of pp=3",
    "pp=2 chunks=2": "is for schedule=interleaved, not for schedule=1f1b",
    "pp=2 group=2": "is for schedule=interleaved, not for schedule=1f1b",
    "pp=2 layers=4 schedule=interleaved": "schedule=interleaved needs at least two chunks on every rank",
    "pp=2 layers=4 schedule=interleaved chunks=2 micro=1": "schedule=interleaved needs at least pp=2 micro-batches",
    "pp=2 schedule=interleaved chunks=2 layers=4 micro=4 group=5": "must be from pp=2 to micro=4",
    "pp=2 schedule=interleaved chunks=2 layers=4 micro=3": "the last group would have 1 micro-batches, fewer than pp=2 "
    "(group=2)",
    "first_layers=1": "is for several pipeline stages, and pp=1 has one",
    "schedule=gpipe": "is for several pipeline stages, and pp=1 has one",
    "pp=2 last_layers=-1": "must not be negative",
    "wp=2": "splits weights in mode=isp only, not in mode=tp",
    ISP + "tp=2 dp=3 wp=4": "must divide tp*dp=6",
    ISP + "tp=3 heads=6 kv_heads=6 hidden=60 wp=9 dp=3 ffn=90 seq=33": "must be a multiple of wp=9",
    "ffn=255": "must be a multiple of tp=2",
    ISP + "tp=2 dp=3 hidden=96 ffn=256 wp=3": "must be a multiple of wp=3",
    ISP + "tp=2 dp=3 wp=3 heads=6 kv_heads=2 hidden=48 ffn=96": "must divide the 32 rows of keys and values",
    ISP + "tp=2 dp=3 wp=3 heads=6 kv_heads=2 hidden=48 ffn=96 fuse_qkv=false": "must divide the 16 rows of keys and "
    "values",
    "family=opt vocab=257": "is not padded in family=opt, so 2 must divide it",
    ISP
    + "family=llama tp=2 dp=3 wp=3 hidden=96 ffn=96 vocab=260": "is not padded in family=llama, so 6 must divide it",
    "tp=4 heads=6 kv_heads=2 hidden=48 ffn=96": "must be a multiple of tp=4",
    ISP + "tp=9 heads=6 kv_heads=2 hidden=54 ffn=90": "must be a multiple of tp=9",
    "tp=4": "must be a multiple of tp=4 in mode=tp",
    "tp=3 heads=30 kv_heads=10 hidden=60 ffn=96": "must be a multiple of tp=3 in mode=tp",
    ISP + "tp=4 heads=12 kv_heads=3 hidden=48": "must divide tp=4 or be a multiple of it",
    "mode=autotp tp=4": "must be at least tp=4: a rank holds whole kv heads",
    "mode=autotp ffn=1": "must be at least tp=2: every rank holds a part",
    "mode=autotp tied=false vocab=1": "must be at least tp=2: every rank holds a part",
    "mode=autotp embedding=vocab": "mode=autotp leaves it whole",
    "mode=mtp embedding=whole": "mode=mtp splits it",
    "mode=autotp head=parallel": "is not a form of mode=autotp",
    "mode=tp-sp seq=33": "mode=tp-sp splits it over tp=2",
    "preset=tiny-internlm2 mode=msp seq=5 batch=3": "mode=msp splits it over tp=2",
    "head=exchange": "is not a form of mode=tp",
    "embedding=hidden tied=false": "mode=tp splits the vocabulary",
    "mode=mtp embedding=hidden tied=true": "tied=true shares it with the head, which splits the vocabulary",
    "mode=isp head=local cross_entropy=fused": "head=local computes the loss without a collective to fuse",
    "fuse_weights=true": "gathers a block's weights at once, which only mode=isp does",
    "lr=0": "must be a positive number",
    "lr=nan": "must be a positive number",
    "lr=inf": "must be a positive number",
    "clip=-1": "must be 0 (off) or a positive gradient norm",
    "dropout=1.0": "must lie in [0, 1)",
    "random=stateful": "is where masks come from, and without dropout there are none",
    "init=field load=a": "is about values at the beginning, and load= brings those of a checkpoint",
    "mode=autotp init=shard": "ranks draw no shards in mode=autotp: AutoTP cuts weights that it loads",
    "pp=2 init=shard": "draws on each stage by itself, and two stages hold the token table",
    "mode=autotp pp=2": "mode=autotp runs whole models, as DeepSpeed's inference does; pipelines run "
    "mode=tp|tp-sp|mtp|msp|fsp|isp",
    "parity=-1": "must not be negative",
    "load=a save=a": "is the folder of load=, and a case that is run again would begin elsewhere",
    "label_smoothing=1": "must lie in [0, 1)",
    "vocab=1 label_smoothing=0.1": "spreads over the other tokens, and vocab=1 has none",
    "optimizer=adamw dtype=float16": "adamw squares gradients, which underflow to 0 in dtype=float16",
    "mode=isp zero=2": "shares parameters among data ranks, and mode=isp gathers its own over wp",
    "mode=isp bucket=100 fuse_weights=true": "is filled in the order of backward, and fuse_weights=true reduces all "
    "weights of a block at once",
    "mode=autotp bucket=100": "is implemented for mode=tp|tp-sp|mtp|msp|fsp|isp, not for mode=autotp",
    "zero=1 no_sync=true": "is about layers that are gathered and reduced one by one, and zero=1 has none",
    "zero=3 wgrad=fused": "zero=3 sums a layer's gradients in its backward, whole as autograd has them",
    "mode=isp wgrad=deferred": "leaves a gradient to the buffer of all, and mode=isp reduces it over wp in its "
    "backward",
    "zero=4": "is not a stage of ZeRO",
    "zero=2 bucket=100": "zero=2 reduces layer by layer and fills no buckets",
    "zero=1 dp=2 shard=2": "shares parameters among some data ranks, and zero=1 shares none",
    "zero=3 dp=4 shard=3": "must divide dp=4",
    "master=float32": "is wider than the parameters, and dtype=float64 is not narrower",
    "dtype=bfloat16 grad_dtype=float32": "master=none steps parameters by gradients of their own dtype",
    "dtype=bfloat16 scaler=dynamic master=float32": "is for gradients of few exponents, and dtype=bfloat16 has as "
    "many as float32",
    "dtype=float16 scaler=static": "unscales gradients in float32, so that what was scaled is not lost again",
    "dtype=float16 scaler=static master=float32 loss_scale=3": "must be a power of two, so that scaling rounds nothing",
    "dtype=float16 loss_scale=4": "scales with a scaler only, and scaler=none",
    "recompute=selective recompute_layers=2": "is a form of recompute=full, and recompute=selective computes no "
    "layer again",
    "early_stop=true": "is a form of recompute=full, and recompute=none computes no layer again",
    "recompute=full layers=6 recompute_layers=4": "must divide the 6 layers of a stage (recompute_method=uniform)",
    "recompute=full layers=6 pp=2 recompute_layers=2": "must divide the 3 layers of a stage (recompute_method=uniform)",
    "mode=isp recompute=full recompute_layers=2": "mode=isp shares the gathered weights of one layer between "
    "recompute and backward (recompute_method=uniform)",
    "mode=tp-sp recompute=full distribute_saved=true": "is for hidden states that are whole (mode=tp|mtp); "
    "mode=tp-sp splits them already",
    "mode=autotp recompute=full distribute_saved=true": "is for hidden states that are whole (mode=tp|mtp); "
    "mode=autotp has no equal parts of them",
    "mode=msp variant=norm-mean": "is not a known variant",
    "mode=msp head=gather variant=isp-average": "is a deviation of mode=isp, not of mode=msp",
}


def refusal(build: Callable[[], Case]) -> CaseError:
    with pytest.raises(CaseError) as caught:
        build()
    return caught.value


def remedies(error: CaseError) -> list[str]:
    """The words that the message calls legal: `key=value`, or values of the key it names."""
    if "=" in error.legal:
        return [error.legal]
    return [f"{error.key}={value}" for value in error.legal.replace("|", " ").split()]


@pytest.mark.parametrize(("text", "rule"), BROKEN.items(), ids=BROKEN.keys())
def test_message_names_key_value_rule_and_a_legal_value(text: str, rule: str) -> None:
    error = refusal(partial(Case.parse, text))
    assert error.rule == rule
    assert str(error) == f"{error.key}={error.value}: {rule}; legal: {error.legal}"
    accepted = []
    for remedy in remedies(error):
        try:
            accepted.append(Case.parse(f"{text} {remedy}"))
        except CaseError as other:
            assert (other.key, other.rule) != (error.key, rule), remedy
    assert accepted


@pytest.mark.parametrize(
    ("text", "legal"),
    [("tp=7 preset=llama3-405b", "tp=8"), ("tp=7 preset=deepseek-v3", "tp=8"), ("tp=5 preset=gpt3-857m", "tp=4")],
)
def test_heads_that_tp_does_not_divide_name_the_nearest_tp_that_makes_the_case_legal(text: str, legal: str) -> None:
    error = refusal(partial(Case.parse, text))
    assert (error.key, error.legal) == ("heads", legal)
    assert str(Case.parse(f"{text} {legal}"))


def test_every_rule_is_broken_by_one_of_these_texts() -> None:
    paths = [rules.__file__, *(inspect.getsourcefile(owner) or "" for owner in FEATURES.values())]
    nodes = [(path, node) for path in paths for node in ast.walk(ast.parse(Path(path).read_text()))]
    yields = [(path, node) for path, node in nodes if isinstance(node, ast.Yield)]
    reached: set[tuple[str, int]] = set()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename not in paths:
            return None
        reached.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        spaced = refusal(lambda: Case.of(data="my corpus.txt"))  # no text has it: its space ends the word
        for text in BROKEN:
            refusal(partial(Case.parse, text))
    finally:
        sys.settrace(before)
    unbroken = [
        ast.unparse(y)
        for path, y in yields
        if reached.isdisjoint((path, line) for line in range(y.lineno, (y.end_lineno or 0) + 1))
    ]
    assert (spaced.key, spaced.value, spaced.legal) == ("data", "my corpus.txt", "data=corpus.txt")
    assert len(yields) > 60
    assert "\n".join(unbroken) == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("colour=red", "colour=red: is not a word of the case language; legal: preset mode tp dp"),
        ("layer=4", "layer=4: is not a word of the case language; legal: layers"),
        ("=3", "=3: is not a word of the case language"),
        ("tp", "tp=: has no value; legal: tp=2"),
        ("tp=two", "tp=two: must be a whole number; legal: tp=1"),
        ("tp=1_0", "tp=1_0: must be a whole number; legal: tp=1"),
        ("lr=fast", "lr=fast: must be a number; legal: lr=0.1"),
        ("packed=True", "packed=True: must be true or false; legal: packed=true"),
        ("preset=gpt9", f"preset=gpt9: must be a known preset; legal: {' '.join(PRESETS)}"),
        ("family=gpt9", f"family=gpt9: must be a known family; legal: {' '.join(FAMILIES)}"),
    ],
)
def test_word_that_cannot_be_read_is_refused(text: str, message: str) -> None:
    assert message in str(refusal(partial(Case.parse, text)))


SIZES = {"tp": 6, "dp": 4, "wp": 6, "hidden": 100, "heads": 12, "kv_heads": 12, "ffn": 100, "vocab": 300, "seq": 20}
CHOICES = "mode positions packed tied head embedding delivery family".split()
CHANGES: dict[str, st.SearchStrategy[Any]] = {word: st.integers(1, most) for word, most in SIZES.items()}
CHANGES |= {word: st.sampled_from(domains()[word]) for word in CHOICES}


@settings(max_examples=100, deadline=None)
@given(case=st.sampled_from(tuple(MODES)).flatmap(cases), changes=st.fixed_dictionaries({}, optional=CHANGES))
def test_following_the_advice_ends_in_a_legal_case(case: Case, changes: dict[str, Any]) -> None:
    text = " ".join(f"{key}={write(value)}" for key, value in {**case.words(), **changes}.items())
    for _ in range(40):  # more than there are words to mend
        try:
            Case.parse(text)
            return
        except CaseError as error:
            text += " " + remedies(error)[0]
    pytest.fail(f"still illegal: {text}")
