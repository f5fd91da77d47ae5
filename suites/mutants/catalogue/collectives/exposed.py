"""Exposed calls: every number and every event right, but what should travel behind a product is waited for at once."""

from __future__ import annotations

from suites.mutants.catalogue.collectives.overlap_and_buffers import OVERLAPPED
from suites.mutants.mutant import TENSOR, Change, Mutant, everywhere

__all__ = ["EXPOSED"]


def _exposed(
    name: str, system: str, modes: dict[str, str], change: Change, *, phase: str = "backward", region: str = "head"
) -> Mutant:
    """The mutant that waits where it issues; its words follow from that."""
    return Mutant(
        name=name,
        stands_for=f"B-90: {system}, the handle is waited for where it is made: nothing overlaps",
        modes=modes,
        condition="overlap=true",
        suite=OVERLAPPED,
        changes=(change,),
        kills="overlap",
        alone=True,
        phase=phase,
        region=region,
        cause="exposed",
    )


def _then(module: str, issue: str, wait: str) -> Change:
    """These lines follow the line that issues."""
    return Change(module=f"parallel.{module}", old=issue, new=f"{issue}{wait}")


EXPOSED = (
    _exposed(
        "input-gradient-awaited-before-the-weights",
        "Megatron LinearWithGradAccumulationAndAsyncCommunication",
        everywhere("", TENSOR),
        _then(
            "layers.linear",
            "reduced = region.start_reduce(grad @ weight, overlap=region.overlap and wants_weight)",
            "\n            grad_x, reduced = reduced.wait(), None",
        ),
    ),
    _exposed(
        "gathered-input-awaited-before-the-product",
        "InternEvo SPFusedDenseFunc",
        everywhere("", ("tp-sp", "fsp")),
        _then(
            "layers.linear",
            "total = Pending(None, lambda: x) if region.keep else region.start_gather(x)",
            "\n            arrived = total.wait()\n            total = Pending(None, lambda: arrived)",
        ),
    ),
    _exposed(
        "overlap-that-nobody-reads",
        "Megatron CUDA_DEVICE_MAX_CONNECTIONS, a switch that no longer reaches the linear",
        everywhere("", TENSOR),
        Change(
            module="parallel.schemes.tensor", old="keep=keep, overlap=case.overlap)", new="keep=keep, overlap=False)"
        ),
    ),
    _exposed(
        "prefetched-weights-awaited-at-once",
        "InternEvo isp prefetch",
        {"isp": "fuse_weights=false"},
        Change(
            module="parallel.weights.prefetch",
            old="self._loans[seat.number] = _Loan(partial(_arrived, pending), uses)",
            new="self._loans[seat.number] = _Loan(partial(list, _arrived(pending)), uses)",
        ),
        phase="forward",
        region="layers.0.attention.*",
    ),
    _exposed(
        "prefetched-block-awaited-at-once",
        "InternEvo layer_fuse_isp_comm",
        {"isp": "fuse_weights=true layers>1"},
        _then(
            "weights.prefetch",
            "flat = FlatGather([x for seat in seats for x in seat.shards], self.axis, overlap=self.plan.ahead)",
            "\n            flat.tensors(0, 1)",
        ),
        phase="forward|backward",
        region="layers.0.attention.wo|head",
    ),
    _exposed(
        "weight-gradient-awaited-before-the-input",
        "InternEvo WPFusedDenseFunc",
        {"isp": ""},
        _then(
            "weights.linear",
            "reduced = [supply.reduce(rows.t() @ x.flatten(0, -2))]",
            "\n        arrived = reduced[0].wait()\n        reduced = [Pending(None, lambda: arrived)]",
        ),
    ),
    _exposed(
        "head-gathered-before-its-gradient",
        "InternEvo ScaleColumnParallelLinear",
        {"isp": ""},
        Change(
            module="parallel.weights.linear",
            old="return lambda: [pending.wait()]",
            new="arrived = pending.wait()\n        return lambda: [arrived]",
        ),
    ),
)
