"""Buckets, ZeRO, masters and loss scales against the dense model, and their ledgers against the closed form."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bugs.planting import planted, source_of
from harness.checking.evidence import PASS
from parallel.data_parallel.buckets import bucketed
from parallel.data_parallel.parity import bits_hash
from parallel.subject import subject
from reference.case import Case
from reference.model.parameters import shapes
from reference.training.scaling import LossScale
from suites.session.prover import Prover
from tests.parallel.case_tables import DATA_PARALLEL, HALF
from tests.parallel.test_cases import proved

SIZES = DATA_PARALLEL.sizes
ONE_LAYER = f"layers=1 {HALF}"


@given(st.sampled_from((0, 1, 2, 3)), st.sampled_from((0, 500, 3000)), st.sampled_from((1, 2, 5)))
def test_bytes_of_a_step(zero: int, bucket: int, dp: int) -> None:
    """What data ranks send is Rajbhandari et al.'s count: 2 psi for zero 0 to 2 a step, 3 psi for zero=3."""
    case = Case.parse(f"{SIZES} mode=tp tp=1 dp={dp} steps=1 micro=1 zero={zero} bucket={bucket if zero < 2 else 0}")
    sizes = {name: math.prod(shape) for name, shape in padded(case).items()}
    sent = Counter[str]()
    for term in subject.expected(case):
        if term.axis == "dp" and term.payload_bytes > 16:
            sent[term.op] += term.calls * term.payload_bytes // 8
    if dp == 1:
        assert not sent
    elif zero == 0:
        assert sent == {"all_reduce": sum(sizes.values())}
    elif zero == 1:
        whole = sum(one.size for one in bucketed(sizes, ranks=dp, sharded=True, largest=bucket))
        assert sent == {"reduce_scatter": whole, "all_gather": whole}
    else:
        rows = {name: -(-shape[0] // dp) * dp * math.prod(shape[1:]) for name, shape in padded(case).items()}
        again = sum(size for name, size in rows.items() if zero == 3 and name.startswith("layers."))
        assert sent == {"reduce_scatter": sum(rows.values()), "all_gather": sum(rows.values()) + again}


@pytest.mark.parametrize("words", ["mode=tp bucket=700", "mode=tp-sp zero=1 bucket=700", "mode=mtp zero=1"])
def test_the_order_of_weight_gradients_changes_no_call(words: str) -> None:
    """Fused or deferred, the calls of a run are the same but for the phase of a deferred weight's bucket."""

    def calls(wgrad: str) -> tuple[Counter[tuple[object, ...]], Counter[str]]:
        found, phases = Counter[tuple[object, ...]](), Counter[str]()
        for term in subject.expected(Case.parse(f"{SIZES} tp=3 dp=2 {words} wgrad={wgrad}")):
            found[term.op, term.reduce_op, term.axis, term.dtype, term.payload_bytes] += term.calls
            phases[f"{term.phase} {term.axis}"] += term.calls
        return found, phases

    (plain, phases), fused, (deferred, later) = calls("plain"), calls("fused"), calls("deferred")
    assert fused == (plain, phases)
    assert deferred == plain
    assert later["backward dp"] < phases["backward dp"] or "bucket" not in words


def test_a_replica_that_differs_ends_the_run_with_its_name(prover: Prover) -> None:
    """One bit of one element on one rank, which bit-for-bit comparisons after the run find as well."""
    source = source_of("parallel.training.loop")
    filled = "parameter.copy_(initial(case, name, places[name], mesh.coordinates, streams))\n"
    assert source.count(filled) == 1
    other = filled + (
        "                if mesh.rank == 2 and name == 'layers.1.mlp_norm.weight':\n"
        "                    parameter[3] = torch.nextafter(parameter[3], parameter[3] + 1)\n"
    )
    wrong = planted({"parallel.training.loop": source.replace(filled, other)})
    result = prover.proof(Case.parse(f"{SIZES} mode=tp tp=3 dp=2 parity=2"), wrong)
    (verdict,) = (one for one in result.verdicts if one.verdict != PASS)
    assert verdict.check == "run"
    assert "parity: before step 0 layers.1.mlp_norm.weight of ranks [2] is not that of rank 0" in verdict.message


@given(st.integers(0, 9), st.sampled_from((torch.float64, torch.float32, torch.bfloat16)))
def test_a_hash_differs_with_every_element_and_place(place: int, dtype: torch.dtype) -> None:
    tensor = torch.linspace(-1, 2, 10).to(dtype)
    other = tensor.clone()
    other[place] += 1
    swapped = tensor.roll(1)
    hashes = {int(bits_hash(one)) for one in (tensor, other, swapped)}
    assert len(hashes) == 3 and int(bits_hash(tensor.clone())) in hashes


def padded(case: Case) -> dict[str, tuple[int, ...]]:
    """Shapes with the rows that the vocabulary is padded by."""
    return {
        name: (case.padded_vocab, shape[1]) if shape[0] == case.vocab else shape for name, shape in shapes(case).items()
    }


def test_a_skipped_step_changes_nothing_on_any_rank(prover: Prover) -> None:
    """At 2**32 every step overflows: parameters stay bit for bit, two skips use up patience, the third halves."""
    result = proved(prover, f"{SIZES} mode=tp-sp tp=3 dp=2 {ONE_LAYER} zero=1 scaler=dynamic")
    assert result.evidence is not None
    merged = result.evidence.merged.tensors
    assert [merged[f"skipped/{step}"].item() for step in range(3)] == [1, 1, 1]
    assert [merged[f"loss_scale/{step}"].item() for step in range(3)] == [2.0**32, 2.0**32, 2.0**31]
    for name in shapes(result.case if isinstance(result.case, Case) else Case()):
        assert torch.equal(merged[f"param/{name}"], merged[f"param_after/0/{name}"])
        assert f"grad/{name}" not in merged


def test_the_dense_models_scale_is_that_of_the_seeds_log() -> None:
    scale = LossScale.of(Case.parse("dtype=float16 master=float32 scaler=dynamic"))
    for step in range(200):
        scale.update(skipped=step < 20)
    assert scale.value == 8192.0


def test_what_rounding_decides_is_refused(prover: Prover) -> None:
    case = Case.parse(f"{SIZES} {ONE_LAYER} mode=tp tp=2 heads=6 kv_heads=2 scaler=static loss_scale=4096")
    with pytest.raises(Exception, match=r"loss_scale=4096.0: scaled gradients reach .* legal: loss_scale="):
        prover.proof(case, subject)
