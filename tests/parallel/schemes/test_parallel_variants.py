"""Tests of bugs/variants.txt. Variants: each is refused where it cannot show, fails wherever it can, and the failure
names its cause.
"""

from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from shardproof.harness.checking.checks import CHECKS
from shardproof.harness.engines.engine import Engine
from shardproof.harness.running.proof import prove
from shardproof.reference.case import Case, CaseError
from shardproof.reference.case.variants import VARIANTS, words
from shardproof.suites.drawing.strategies import cases

FLAT = "it holds the right numbers as if flat memory were its"
TOLD = {
    "norm-average": ("parameter_gradients", "reduce_op avg instead of sum"),
    "isp-average": ("parameter_gradients", "is 1 / the size of "),
    "scrambled-embedding": ("parameter_gradients", FLAT),
    "gathered-logits-loss": ("forward", "over tp too many"),
    "flat-dim1": ("activations", FLAT),
    "label-smoothing-local": ("replicas", "over tp is left out|payload_bytes"),
    "decoder-layer-thirds": ("forward", "it holds the right rows in another order"),
    "context-heads-repeated": ("ledger", "payload_bytes"),
    "dropped-heads": ("merge", "the ranks' parts do not make the full tensor"),
    "two-stage-swap": ("activation_gradients", "agree with the truth; loss 1 of 1, logits 1 of 1, gradients"),
    "ckpt-early-stop": ("ledger", "the all_reduce over tp is left out|the reduce_scatter over tp is left out"),
    "ddp-rebuild": ("ledger", "the all_reduce over dp is left out"),
    "pp-scale-missing": ("activation_gradients", "it is 3 x the truth; 3 is the number of micro-batches"),
    "tied-no-sync": ("replicas", "the all_reduce over embedding is left out"),
    "tied-bucket-misaligned": ("ledger", "the call is made otherwise: payload_bytes"),
    "experts-average": ("parameter_gradients", "is 1 / the size of edp"),
    "experts-as-dense": ("replicas", "axis dp instead of edp"),
    "expert-norm-by-tp": ("gradient_norm", "one all_reduce over tp too many"),
    "balance-own-tokens": ("activation_gradients", "right: tokens 1 of 1, loss 1 of 1, logits 1 of 1, routing"),
    "global-balance-by-copies": ("activation_gradients", ""),
    "balance-counts-in-place": ("activation_gradients", ""),
    "bias-counts-short": ("ledger", "dtype bfloat16 instead of int64"),
    "experts-alike": ("activations", "initial values: rank "),
    "combine-in-router-dtype": ("ledger", "dtype float32 instead of bfloat16"),
    "capacity-of-the-group": ("routing", "; right: tokens 1 of 1, activations"),
    "token-copies": ("activation_gradients", "one reduce_scatter over tp too many"),
    "context-ranks-share-streams": ("masks", "hold different shards over cp and drop by one mask"),
    "mla-rope-key": ("activation_gradients", "the all_reduce over tp is left out"),
    "mla-query-norm": ("parameter_gradients", "one all_reduce over tp too many"),
    "mtp-main-count": ("activation_gradients", "it is 0."),
    "mtp-local-means": ("activation_gradients", "right: tokens 1 of 1, loss 1 of 1, logits 1 of 1, act|it is 1."),
}
"""Variant -> the check that fails for sure, and what its likely causes say; "" where that is as in the line above."""


WORLDS = {
    **{name: (2,) for name, variant in VARIANTS.items() if {*variant.suite} & {"dp", "pp", "experts"}},
    "isp-average": (3,),
}
"""A factor of 1/2 may be a constant where no legal case has another tp: no cause is reported there. Stages and data
ranks of a variant's own words come on top.
"""
EXPLAINED = (
    *("norm-average", "isp-average", "scrambled-embedding", "label-smoothing-local", "decoder-layer-thirds"),
    *("dropped-heads", "two-stage-swap", "pp-scale-missing", "experts-as-dense", "bias-counts-short", "experts-alike"),
    *("token-copies", "context-ranks-share-streams"),
)
"""One of every kind of cause: further runs explain a failure. All are explained in the profile `deep`."""
EXAMPLES = max(1, settings().max_examples // 16)


@pytest.mark.parametrize("name", VARIANTS)
@settings(max_examples=EXAMPLES, deadline=None, phases=(Phase.generate,))
@given(data=st.data())
def test_a_variant_fails_and_its_cause_is_named(name: str, engine: Engine, data: st.DataObject) -> None:
    """Every drawn case that can show it fails, so the smallest one does."""
    mode = data.draw(st.sampled_from(list(VARIANTS[name].modes)))
    layers = 2 if {"pp", "bucket"} & {*VARIANTS[name].suite} else 1
    shown: dict[str, Any] = {"layers": layers, "steps": 1, **words(name)}
    case = data.draw(cases(mode, worlds=WORLDS.get(name, (2, 3)), **shown))
    check, told = TOLD[name]
    explain = bool(told) and (name in EXPLAINED or EXAMPLES > 1)
    checks = {check: CHECKS[check]}
    result = prove(case, "shardproof.parallel.subject:subject", engine, checks=checks, explain=explain)
    failed = {v.check: v.message for v in result.verdicts if v.verdict == "fail"}
    assert check in failed, (str(case), sorted(failed))
    if explain:
        (causes,) = [line for line in failed[check].splitlines() if line.startswith("causes:")]
        assert any(one in causes for one in told.split("|")), failed[check]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("variant=G1", "is not a known variant"),
        ("mode=tp variant=norm-average", "is a deviation of mode=msp|fsp, not of mode=tp"),
        ("mode=msp tp=1 variant=norm-average", "shows with tp>1 only"),
        ("mode=mtp variant=gathered-logits-loss", "shows with head=gather only"),
        ("mode=fsp family=internlm2 vocab=264 packed=true variant=flat-dim1", "shows with packed=false only"),
        ("mode=tp variant=label-smoothing-local", "shows with label_smoothing>0 only"),
        ("cp=2 heads=4 kv_heads=4 hidden=16 variant=context-heads-repeated", "shows with kv_heads<heads only"),
        (
            "mode=autotp heads=4 kv_heads=2 hidden=16 variant=decoder-layer-thirds",
            "shows with kv_group%3=0 only; kv_group = 16 rows of a kv group",
        ),
        ("mode=autotp kv_heads=2 variant=dropped-heads", "shows with kv_heads%tp>0 only"),
        (
            "mode=tp dp=2 bucket=999999 variant=ddp-rebuild",
            "shows with bucket<table only; table = 16256 elements of a rank's token table",
        ),
        ("mode=tp pp=2 schedule=interleaved chunks=2 layers=4 variant=two-stage-swap", "shows with micro>2 only"),
    ],
)
def test_a_case_that_cannot_show_a_variant_is_refused(text: str, rule: str) -> None:
    with pytest.raises(CaseError) as caught:
        Case.parse(text)
    assert (caught.value.key, caught.value.rule) == ("variant", rule)
    legal = [f"variant={name}" for name in caught.value.legal.split()] if "G1" in text else [caught.value.legal]
    assert legal == [f"variant={name}" for name in VARIANTS] or Case.parse(f"{text} {legal[0]}").variant == ""


@pytest.mark.parametrize("name", VARIANTS)
def test_its_words_make_every_mode_that_has_it_show_it(name: str) -> None:
    for mode in VARIANTS[name].modes:
        for family in ("gpt", "internlm2 vocab=264", "llama vocab=264"):
            case = Case.parse(f"mode={mode} tp=2 family={family}").but(**words(name))
            assert case.variant == name and Case.parse(str(case)) == case
    with pytest.raises(ValueError, match="variant=E7: is not a known variant; legal: norm-average isp-average"):
        words("E7")
