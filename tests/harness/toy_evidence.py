"""A small right run to plant wrong evidence in: two tensor-parallel ranks, two steps, a hand-made truth and ledger.

The model is no model. Its tensors are random numbers under the canonical names, sharded as a column linear (w1) and a
row linear (w2) would be. Shapes are tiny, payloads in bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardproof.harness.checking.checks import Check, run_check, run_checks
from shardproof.harness.checking.finding import Finding
from shardproof.harness.checking.records import (
    Calls,
    Claims,
    Controls,
    Evidence,
    RecordedRun,
    Repeats,
    Truth,
    merged_outcomes,
)
from shardproof.harness.diagnosing.diagnosis import diagnose, explanation_of
from shardproof.harness.diagnosing.explained import failed_check
from shardproof.harness.ledger import Event, wire_bytes
from shardproof.harness.outcome.blocks import localize
from shardproof.harness.outcome.merging import Outcomes
from shardproof.harness.protocols import Shard
from shardproof.harness.running.result import verdict_on
from shardproof.harness.terms import Term
from shardproof.reference.case import Case

_RECORDS = ("run", "calls", "truth", "controls", "claims", "search")
"""Fields of records that are records themselves."""
MODULES = ("embedding", "layers.0.mlp.w1", "layers.0.mlp.w2", "layers.0.mlp", "head")
_SHAPES = {
    "embedding.tokens.weight": (12, 6),
    "layers.0.mlp.w1.weight": (8, 6),
    "layers.0.mlp.w2.weight": (6, 8),
    "layers.0.mlp.w2.bias": (6,),
}
_CUT = {"layers.0.mlp.w1.weight": 0, "layers.0.mlp.w2.weight": 1}


a_term = partial(
    Term, op="all_reduce", reduce_op="sum", axis="tp", group_size=2, dtype="float64", payload_bytes=384, calls=4
)
"""Line of a closed form."""


TERMS: tuple[Any, ...] = (
    a_term(phase="forward", region="embedding"),
    a_term(phase="forward", region="layers.0.mlp.w2"),
    a_term(phase="loss", region="", reduce_op="max", payload_bytes=64),
    a_term(phase="backward", region="layers.0.mlp.w1"),
    a_term(phase="backward", region="head"),
)


def case(text: str = "mode=tp tp=2 seq=16") -> Case:
    """The case that the evidence belongs to."""
    return Case.parse(text)


def _random(name: str, shape: tuple[int, ...]) -> Tensor:
    return drawn(*shape, seed=sum(map(ord, name)))


def truth() -> dict[str, Tensor]:
    """Canonical names with random numbers."""
    named: dict[str, Tensor] = {f"init/{name}": _random(f"init/{name}", shape) for name, shape in _SHAPES.items()}
    named |= {"mask/0/embedding": torch.ones(4, 3, 6, dtype=torch.bool)}
    for step in range(2):
        named[f"tokens/{step}"] = torch.tensor(262 + step)
        named[f"loss/{step}"] = _random(f"loss/{step}", ()).abs() + 5
        named[f"logits/{step}"] = _random(f"logits/{step}", (4, 3, 12))
        named[f"grad_norm/{step}"] = _random(f"grad_norm/{step}", ()).abs() + 2
    for kind in ("grad", "param"):
        named |= {f"{kind}/{name}": _random(f"{kind}/{name}", shape) for name, shape in _SHAPES.items()}
    for kind in ("act", "act_grad"):
        widths = {module: 12 if module == "head" else 6 for module in MODULES}  # the head returns logits
        named |= {f"{kind}/{module}": _random(f"{kind}/{module}", (2, 3, width)) for module, width in widths.items()}
    squares = [tensor.square().sum() for name, tensor in named.items() if name.startswith("grad/")]
    return named | {"grad_norm/0": torch.stack(squares).sum().sqrt()}


def outcome_of(rank: int, values: Mapping[str, Tensor]) -> dict[str, Any]:
    """Outcome of a right rank of two for these full tensors: shards of cut weights, everything else in full."""
    outcome: dict[str, Any] = {}
    for name, full in values.items():
        dim = _CUT.get(name.partition("/")[2]) if name.startswith(("init/", "grad/", "param/")) else None
        if dim is None:
            outcome[name] = full
        else:
            offsets = tuple(rank * full.shape[d] // 2 if d == dim else 0 for d in range(full.dim()))
            outcome[name] = Shard(full.chunk(2, dim)[rank], offsets, tuple(full.shape))
    return outcome


def events(terms: Sequence[Any] = TERMS, world_size: int = 2) -> tuple[Event, ...]:
    """The ledger that these terms describe, the same on every rank."""
    ledger = []
    run = {"case": "mode=tp", "mode": "tp", "world_size": world_size, "caller": "model.py:7", "shape": ""}
    told = ("phase", "region", "op", "reduce_op", "axis", "group_size", "dtype", "payload_bytes")
    for rank in range(world_size):
        for index, (term, call) in enumerate((one, call) for one in terms for call in range(one.calls)):
            first, wire = rank - rank % term.group_size, wire_bytes(term.op, term.payload_bytes, term.group_size)
            fields: dict[str, Any] = {**run, **{name: getattr(term, name) for name in told}, "rank": rank}
            fields |= {"step": call // 2, "microbatch": call % 2, "call_index": index, "start_us": float(index)}
            fields |= {"group": tuple(range(first, first + term.group_size)), "wire_bytes": wire}
            ledger.append(Event(**fields, is_async=False, duration_us=1.0))
    return tuple(ledger)


def evidence(*ranks: Mapping[str, Any], repeat: Sequence[Mapping[str, Any]] | None = None, **changes: Any) -> Evidence:
    """Right evidence; `ranks` replaces what the ranks returned, `changes` any field of a record (`but`).

    `truth` is its tensors, `controls` its control runs, `orders` rank lists in place of the case's.
    """
    true, text = changes.pop("truth", truth()), changes.pop("case", case())
    returned = ranks or [outcome_of(rank, true) for rank in range(2)]
    outcomes: Outcomes = [localize(rank) for rank in returned]
    captured: Outcomes = changes.pop("captured", ())
    right = Evidence(
        run=RecordedRun(
            calls=Calls(case=text, events=events()),
            outcomes=outcomes,
            captured=captured,
            merged=merged_outcomes(outcomes, captured, true),
        ),
        truth=Truth(
            tensors=true, controls=Controls(runs=changes.pop("controls", ())), init_std=dict.fromkeys(_SHAPES, 1.0)
        ),
        claims=Claims(axes={**text.axes, **changes.pop("orders", {})}, expectation=TERMS),
        repeats=Repeats(runs=([localize(rank) for rank in repeat or returned],)),
    )
    return but(right, **changes)


def but(seen: Evidence, **changes: Any) -> Evidence:
    """The evidence with these fields of its records."""
    left = dict(changes)

    def changed(record: Any) -> Any:
        names = [each.name for each in fields(record)]
        inner = {name: changed(getattr(record, name)) for name in _RECORDS if name in names}
        return replace(record, **inner, **{name: left.pop(name) for name in names if name in left})

    made: Evidence = changed(seen)
    assert not left, f"no record has the fields {[*left]}"
    return made


def answer_of(check: Check, seen: Evidence) -> Any:
    """What a check finds in the records of this evidence."""
    return run_check(check, seen.records)


def drawn(*shape: int, seed: int = 7) -> Tensor:
    """Random numbers in float64, the same every time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def planted(values: Mapping[str, Tensor], **changes: Any) -> Evidence:
    """Evidence of two ranks that return the truth but for these full tensors; `changes` are as in `evidence`."""
    known = {**changes.get("truth", truth()), **values}
    return evidence(*(outcome_of(rank, known) for rank in range(2)), **changes)


def ids_of(found: Evidence) -> list[str]:
    """The causes of what fails."""
    return [cause.id for cause in explanation_of(found, run_checks(found)).causes]


def told_by(found: Evidence, check: str = "") -> list[str]:
    """The lines about a check, or about the first one that fails."""
    findings = run_checks(found)
    first = next((name for name, finding in findings.items() if finding.verdict == "fail"), "")
    finding = findings[check := check or first]
    failure = failed_check(diagnose(found, findings, check), finding, found.run, "my.module:subject")
    return verdict_on(finding, str(found.run.case), check, failure).lines


def named(findings: Mapping[str, Finding], verdict: str) -> set[str]:
    """The checks that gave this verdict."""
    return {name for name, finding in findings.items() if finding.verdict == verdict}


def without(ledger: Sequence[Event], **fields: Any) -> tuple[Event, ...]:
    """The ledger without the first event of every rank that has these fields."""
    left, dropped = [], set()
    for event in ledger:
        if event.rank not in dropped and all(getattr(event, key) == value for key, value in fields.items()):
            dropped.add(event.rank)
        else:
            left.append(event)
    return tuple(left)


def altered(ledger: Sequence[Event], place: int, **fields: Any) -> tuple[Event, ...]:
    """The ledger with one event changed."""
    return tuple(replace(event, **fields) if i == place else event for i, event in enumerate(ledger))
