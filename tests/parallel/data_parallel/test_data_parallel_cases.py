"""Tests of data_parallel/scheme. Buckets, ZeRO, masters and loss scales: bytes of a step, replicas that differ, skipped
steps, what a rank keeps.

Behind two skips, the second of which halves the loss scale, the third step is real.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardproof.bugs.anchors import source_of
from shardproof.bugs.planting import plant_subject
from shardproof.harness.engines.threads.dry import DryEngine
from shardproof.harness.predicting.figures import EQUAL, mixed_adamw
from shardproof.harness.predicting.forecast import forecast_case
from shardproof.harness.recording.measures import SavedActivations
from shardproof.harness.verdicts.verdict import FAIL, PASS
from shardproof.parallel.communication.layout import coordinates, local_shape
from shardproof.parallel.data_parallel.buckets import make_buckets
from shardproof.parallel.data_parallel.scheme import bits_hash
from shardproof.parallel.schemes.tensor import placements
from shardproof.parallel.subject import subject
from shardproof.reference.case import Case
from shardproof.reference.model.parameters import shapes
from shardproof.suites.mutants.catalogue import Mutant, of_file
from shardproof.suites.session.prover import Prover
from tests.parallel.case_tables import HALF, TABLES
from tests.parallel.ranks import stated
from tests.parallel.test_parallel_subject import proved

SIZES = TABLES["data_parallel"].sizes
ONE_LAYER = f"layers=1 {HALF} steps=3"


@given(st.sampled_from((0, 1, 2, 3)), st.sampled_from((0, 500, 3000)), st.sampled_from((1, 2, 5)))
def test_bytes_of_a_step(zero: int, bucket: int, dp: int) -> None:
    """Data ranks send Rajbhandari et al.'s count: 2 psi for zero 0 to 2 a step, 3 psi for zero=3."""
    case = Case.parse(f"{SIZES} mode=tp tp=1 dp={dp} steps=1 micro=1 zero={zero} bucket={bucket if zero < 2 else 0}")
    rows = {name: case.padded_vocab if shape[0] == case.vocab else shape[0] for name, shape in shapes(case).items()}
    sizes = {name: rows[name] * math.prod(shape[1:]) for name, shape in shapes(case).items()}
    found = stated(case, "op", where=lambda term: term.axis == "dp" and term.payload_bytes > 16, each="bytes")
    sent = {op: size // 8 for op, size in found.items()}
    if dp == 1:
        assert not sent
    elif zero == 0:
        assert sent == {"all_reduce": sum(sizes.values())}
    elif zero == 1:
        whole = sum(one.size for one in make_buckets(sizes, ranks=dp, sharded=True, largest=bucket))
        assert sent == {"reduce_scatter": whole, "all_gather": whole}
    else:
        even = {name: -(-rows[name] // dp) * dp * math.prod(shape[1:]) for name, shape in shapes(case).items()}
        again = sum(size for name, size in even.items() if zero == 3 and name.startswith("layers."))
        assert sent == {"reduce_scatter": sum(even.values()), "all_gather": sum(even.values()) + again}


def test_a_replica_that_differs_ends_the_run_with_its_name(prover: Prover) -> None:
    """A bit of one element on one rank, which bit-for-bit comparisons after the run find as well."""
    source = source_of("shardproof.parallel.training")
    filled = "parameter.copy_(initial_value(case, name, places[name], mesh.coordinates, streams))\n"
    assert source.count(filled) == 1
    other = filled + (
        "                if mesh.rank == 2 and name == 'layers.1.mlp_norm.weight':\n"
        "                    parameter[3] = torch.nextafter(parameter[3], parameter[3] + 1)\n"
    )
    wrong = plant_subject({"shardproof.parallel.training": source.replace(filled, other)})
    result = prover.proof(Case.parse(f"{SIZES} mode=tp tp=3 dp=2 parity=2"), wrong)
    (verdict,) = (one for one in result.verdicts if one.verdict != PASS)
    assert verdict.check == "run"
    assert "parity: before step 0 layers.1.mlp_norm.weight of ranks [2] is not that of rank 0" in verdict.message


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_hash_differs_with_every_element_and_place(dtype: torch.dtype) -> None:
    tensor = torch.linspace(-1, 2, 10).to(dtype)
    others = [tensor.index_add(0, torch.tensor([place]), torch.ones(1, dtype=dtype)) for place in range(10)]
    hashes = [int(bits_hash(one)) for one in (tensor, tensor.roll(1), *others)]
    assert len({*hashes}) == 12 and int(bits_hash(tensor.clone())) == hashes[0]


def test_a_skipped_step_changes_nothing_on_any_rank(prover: Prover) -> None:
    """At 2**32 every step overflows: parameters stay bit for bit, and the second skip halves the scale."""
    result = proved(prover, f"{SIZES} mode=tp-sp tp=3 dp=2 {ONE_LAYER} zero=1 scaler=dynamic")
    assert result.evidence is not None
    merged = result.evidence.run.tensors
    assert [merged[f"skipped/{step}"].item() for step in range(3)] == [1, 1, 1]
    assert [merged[f"loss_scale/{step}"].item() for step in range(3)] == [2.0**32, 2.0**32, 2.0**31]
    for name in shapes(result.case if isinstance(result.case, Case) else Case()):
        assert torch.equal(merged[f"param/{name}"], merged[f"param_after/0/{name}"])
        assert f"grad/{name}" not in merged


def test_what_rounding_decides_is_refused(prover: Prover) -> None:
    words = "mode=tp-sp tp=3 dp=2 zero=1 micro=2 grad_dtype=float32 scaler=static loss_scale=8192"
    with pytest.raises(Exception, match=r"loss_scale=8192.0: some scaled gradient in step 0 reaches .* legal: loss_"):
        prover.proof(Case.parse(f"{SIZES} {ONE_LAYER} {words}"), subject)


WORDS = "mode=tp-sp tp=2 dp=4 heads=4 kv_heads=2 hidden=32 ffn=72 vocab=389 seq=8 dtype=bfloat16 micro=2"


def test_memory_by_part_and_a_peak_that_falls_with_every_stage(dry: DryEngine) -> None:
    case = Case.parse(WORDS)
    sizes = {name: math.prod(local_shape(place, coordinates(case, 0))) for name, place in placements(case).items()}
    (bucket,) = make_buckets(sizes, ranks=4, sharded=True)
    own, whole = bucket.size // 4, sum(sizes.values())
    of_bucket = sum(min(slot.end, own) - slot.start for slot in bucket.slots if slot.start < own)  # no padding
    peaks = []
    for zero, part in enumerate((whole, of_bucket, whole // 4, whole // 4)):  # four divides every number of rows
        told = forecast_case(case.but(zero=zero), subject, dry, states=mixed_adamw("bfloat16"))
        kept = part if zero > 1 else whole
        assert told.ledger == EQUAL
        assert (told.memory.parameters, told.memory.gradients) == (2 * kept, 4 * kept), zero
        assert told.memory.optimizer == 12 * part, zero
        peaks.append(told.memory.peak)
    assert peaks == sorted(set(peaks), reverse=True)


def test_what_a_programs_own_hooks_keep_is_counted() -> None:
    weight, saved = torch.ones(8, 8, dtype=torch.float64, requires_grad=True), SavedActivations()
    dropped: list[torch.Tensor] = []

    def marked(tensor: torch.Tensor) -> torch.Tensor | int:
        dropped.append(tensor)
        return len(dropped) - 1 if tensor.shape == (5, 8) else tensor

    def found(kept: torch.Tensor | int) -> torch.Tensor:
        return dropped[kept] if isinstance(kept, int) else kept

    with saved.on_rank(0), torch.autograd.graph.saved_tensors_hooks(marked, found):
        first = torch.ones(4, 8, dtype=torch.float64) @ weight
        second = torch.ones(5, 8, dtype=torch.float64) @ weight  # keeps a number in place of its input
        (first.sum() + second.sum()).backward()
    assert saved.peak_bytes(0) == 4 * 8 * 8
    assert weight.grad is not None
    assert weight.grad.sum() == 9 * 8 * 8


SCALED = f"{TABLES['data_parallel'].sizes} layers=1 tied=false {HALF} steps=3 scaler=dynamic"
BEHIND_SKIPS = (
    f"{SCALED} mode=tp tp=2 heads=6 kv_heads=2 loss_scale=8192",
    f"{SCALED} mode=tp-sp tp=3 dp=2 zero=1 micro=2 loss_scale=4096",
    f"{SCALED} mode=tp tp=3 pp=2 layers=2 loss_scale=4096",
)
"""Gradients reach 1.1 to 1.8 times the largest number of float16, so half of the scale is clear of it."""
RARE = pytest.mark.deep("two CPU seconds each")


@pytest.mark.parametrize(
    ("words", "skipped"),
    [
        (BEHIND_SKIPS[0], [1, 1, 0]),
        *(pytest.param(words, [1, 1, 0], marks=RARE) for words in BEHIND_SKIPS[1:]),
        pytest.param(f"{SCALED} mode=tp tp=2 heads=6 kv_heads=2 loss_scale=512", [0, 0, 0], marks=RARE),
        (f"{SCALED} mode=tp tp=2 heads=6 kv_heads=2 loss_scale=65536", [1, 1, 1]),
        (f"{SCALED} mode=tp tp=2 kv_heads=2 grad_dtype=float32 loss_scale=8192", [0, 0, 0]),  # their sum is in float32
        pytest.param(
            f"{SCALED} mode=tp tp=2 kv_heads=2 grad_dtype=float32 wgrad=fused loss_scale=65536", [1, 1, 1], marks=RARE
        ),
    ],
)
def test_a_step_is_skipped_where_rounding_has_no_say(prover: Prover, words: str, skipped: list[int]) -> None:
    result = proved(prover, words)
    assert result.evidence is not None
    assert [result.evidence.run.tensors[f"skipped/{step}"].item() for step in range(3)] == skipped


@pytest.mark.parametrize("bug", of_file("tests/loss_scales"), ids=lambda bug: bug.name)
def test_a_bug_behind_a_skip_is_killed(prover: Prover, bug: Mutant) -> None:
    found = prover.proof(Case.parse(BEHIND_SKIPS[0]), plant_subject(bug.sources()), explain=False, repeat=False)
    failed = {one.check: one.message for one in found.verdicts if one.verdict == FAIL}
    assert failed.keys() & {*bug.kills.split("|")}, failed
