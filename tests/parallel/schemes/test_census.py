"""Census of replicated parameters, conjugacy and call sites: what must be summed, what goes backward, and that a case
reaches every place in `parallel` where a collective is issued.

Which gradients need a sum is found by experiment: without it ranks disagree on them. Which are summed is read from the
ledger's bytes. A site is one call of a raw collective in another module; one that no mode uses is held by the law of
the pairs.
"""

from __future__ import annotations

import ast
import math
import pkgutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import parallel
from bugs.anchors import source_of
from bugs.planting import planted, replaced
from harness.outcome.merging import merge
from harness.protocols import Subject
from harness.running.ranks.execution import execute
from harness.running.ranks.watching import Execution
from parallel.communication import collectives
from parallel.communication.mesh import Axis
from parallel.registry import scheme_of
from parallel.subject import subject
from reference.case import Case
from reference.language.modes import MODES
from reference.model.parameters import shapes
from suites.mutants.catalogue import of_file
from suites.mutants.mutant import Mutant
from suites.session.prover import Prover

SIZES = "layers=1 heads=4 kv_heads=2 hidden=16 ffn=24 seq=8 vocab=264 steps=1 micro=1 tp=2"
WORDS = ("bias=true qk_norm=true positions=learned norm=layernorm", "bias=false positions=rope norm=rmsnorm dp=3")
SUMMED = "if strategy.partial(rank.case, name)]"
NORM_AND_LOSS = (8, 16)
"""Bytes of the calls beside gradients in grad_sync: the squared norm, the loss with its token count."""


def ran(prover: Prover, case: Case, run: Subject) -> Execution:
    """One recorded run."""
    return execute(case, run, prover.engine, text=str(case))


def torn(run: Execution) -> set[str]:
    """Parameters on whose gradients ranks disagree."""
    flaws = merge(run.outcomes).flaws
    return {flaw.name.removeprefix("grad/") for flaw in flaws if flaw.name.startswith("grad/")}


def summed_bytes(run: Execution, axis: str) -> int:
    """Bytes of gradients that rank 0 sums over this axis between backward and step."""
    mine = [e for e in run.events if (e.rank, e.phase, e.op, e.axis) == (0, "grad_sync", "all_reduce", axis)]
    sizes = [event.payload_bytes for event in mine]
    for size in NORM_AND_LOSS[:1]:
        sizes.remove(size)  # the squared norm is always there, once a step
    return sum(sizes)


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("mode", MODES)
def test_the_set_that_is_summed_is_the_set_that_must_be(prover: Prover, mode: str, words: str) -> None:
    case = Case.parse(f"mode={mode} {SIZES} {words}")
    weight_axis = scheme_of(mode).weight_axis
    must = torn(ran(prover, case, planted(replaced("parallel.training.step", SUMMED, "if False]"))))
    right = ran(prover, case, subject)
    assert torn(right) == set()
    assert summed_bytes(right, weight_axis) == sum(8 * math.prod(shapes(case)[name]) for name in must)


def test_one_parameter_forgotten_parts_the_two_sets(prover: Prover) -> None:
    case = Case.parse(f"mode=tp-sp {SIZES} {WORDS[0]}")
    forgotten = planted(replaced("parallel.training.step", SUMMED, SUMMED[:-1] + " and name != 'final_norm.weight']"))
    wrong, right = ran(prover, case, forgotten), ran(prover, case, subject)
    assert torn(wrong) == {"final_norm.weight"}
    assert summed_bytes(right, "tp") - summed_bytes(wrong, "tp") == 8 * 16


MISSING = {"context-is-not-exchanged-back": "all-to-alls", "gradients-of-a-cut-sum-are-not-gathered": "reduce_scatters"}
"""Bug -> which moves lack their conjugates."""


class Closed:
    """A subject whose closed form nobody knows."""

    def __init__(self, inner: Subject) -> None:
        self.inner = inner

    def __call__(self, case: Case, device: torch.device) -> Mapping[str, Any]:
        """What the subject returns."""
        found: Mapping[str, Any] = self.inner(case, device)
        return found


@pytest.mark.parametrize("bug", of_file("tests/conjugates"), ids=lambda bug: bug.name)
def test_a_missing_conjugate_is_told_without_a_closed_form(bug: Mutant, prover: Prover) -> None:
    case = Case.parse(bug.case)
    assert case.mode in subject.modes
    (right,) = [v for v in prover.proof(case, Closed(subject)).verdicts if v.check == "ledger"]
    assert right.verdict == "pass"
    result = prover.proof(case, Closed(planted(bug.sources())))
    (wrong,) = [verdict for verdict in result.verdicts if verdict.check == "ledger"]
    assert wrong.verdict == "fail"
    assert MISSING[bug.name] in wrong.message


SMALL = "layers=1 heads=4 kv_heads=4 hidden=16 ffn=16 seq=8 steps=1 micro=1 tp=2"
EVO = f"preset=tiny-internlm2 {SMALL} vocab=264"
PARTS = f"{SMALL} vocab=264 micro=2 experts=4 top_k=2"
CASES = tuple(
    f"{sizes} {words}"
    for words, sizes in (
        ("mode=tp dp=3 qk_norm=true label_smoothing=0.1", SMALL),
        ("mode=tp cross_entropy=fused delivery=flat head=gather", SMALL),
        ("mode=tp cross_entropy=fused", SMALL),
        ("mode=tp-sp dp=3", SMALL),
        ("mode=tp-sp positions=rope", SMALL),
        ("mode=tp dp=3 bucket=400", SMALL),
        ("mode=tp-sp dp=3 zero=1 bucket=400 steps=2", SMALL),
        ("mode=tp dp=4 zero=3 shard=2", SMALL),
        ("mode=tp dp=3 parity=1 recompute=full distribute_saved=true", SMALL),
        ("mode=tp dp=3 dtype=float16 master=float32 scaler=static loss_scale=4", SMALL),
        ("mode=mtp metric=true", EVO),
        ("mode=msp embedding=hidden head=gather", EVO),
        ("mode=isp metric=true head=local overlap=false", EVO),
        ("mode=isp dp=3 bias=true overlap=false", EVO),
        ("mode=isp embedding=vocab head=gather qk_norm=true", EVO),
        ("mode=isp head=local overlap=true", EVO),
        ("mode=isp fuse_weights=true", EVO),
        ("mode=tp-sp dp=2 ep=2 etp=2 router=sigmoid bias_rate=0.1 aux_loss=0.1 sequence_loss=0.1", PARTS),
        ("mode=tp dp=2 ep=2 etp=2 dispatcher=allgather global_loss=0.1 routing=equal", PARTS),
        ("mode=tp capacity=0.5 capacity_of=micro-batch aux_loss=0.1 balance_of=counted", PARTS),
        ("mode=tp capacity=0.5 capacity_of=micro-batch drop=position routing=skewed", PARTS),
        ("mode=tp-sp tp=1 dp=2 ep=2 dtype=float16 routing=skewed master=float32 scaler=dynamic loss_scale=8.0", PARTS),
        ("mode=tp-sp experts=0 dp=2 prediction_depth=1", PARTS),
    )
)
RAW = collectives.all_reduce.__code__.co_filename
Site = tuple[str, int, str]
"""Module, line, collective."""


def reached(prover: Prover, text: str) -> set[Site]:
    """The sites that communicate on some rank in this case."""
    found: set[Site] = set()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        axis = frame.f_locals.get("axis") if event == "call" and frame.f_code.co_filename == RAW else None
        if isinstance(axis, Axis) and axis.size > 1 and frame.f_back:
            found.add((frame.f_back.f_globals["__name__"], frame.f_back.f_lineno, frame.f_code.co_name))

    def profiled(case: Case, device: torch.device) -> Mapping[str, Any]:
        sys.setprofile(profile)
        try:
            return subject(case, device)
        finally:
            sys.setprofile(None)

    execute(Case.parse(text), profiled, prover.engine, text=text)
    return found


def sites(module: str) -> Iterator[Site]:
    """The calls of raw collectives that this module imports."""
    tree = ast.parse(source_of(module))
    taken = [one for one in ast.walk(tree) if isinstance(one, ast.ImportFrom) and one.module == collectives.__name__]
    raw = {alias.asname or alias.name: alias.name for node in taken for alias in node.names if alias.name.islower()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in raw:
            yield module, node.lineno, raw[node.func.id]


def test_every_call_site_is_reached_by_a_case(prover: Prover, tmp_path: Path) -> None:
    modules = [info.name for info in pkgutil.walk_packages(parallel.__path__, "parallel.")]
    every = {site for module in modules if module != collectives.__name__ for site in sites(module)}
    texts = (*CASES, f"{SMALL} mode=tp dp=3 save={tmp_path / 'checkpoint'}")
    left = every - {site for text in texts for site in reached(prover, text)}
    assert len(every) > 40
    assert {module for module, _, _ in left} <= {"parallel.communication.pairs"}, sorted(left)
