"""Parts in another order, data and positions read otherwise: more of bugs.md 6e, in other places of the code."""

from __future__ import annotations

from suites.mutants.mutant import TENSOR, Change, Mutant, everywhere

__all__ = ["ORDERS_AND_PARTS"]

_JOIN = "return torch.cat(parts.chunk(axis.size), dim)"
_OWN = "return x.narrow(dim, axis.rank * width, width).contiguous()"
_SPLIT = "parts: Tensor = x.unflatten(dim, (axis.size, width)).movedim(dim, 0)"
_FILLED = "parameter.copy_(initial(case, name, places[name], mesh.coordinates, streams))"
_LABELS = "labels=batch.labels.to(device),"
_READ = 'micro_batch(case, step, micro, mesh.axis("dp").rank)'
_ROTATED = "q, k = rotate(q, table), rotate(k, table)"
_INNER = {"mtp": "embedding=hidden", "tp": "head=gather", "tp-sp": "head=gather", "isp": "", "msp": "", "fsp": ""}
_MOVED = "other_shard|shifted_shard"


def _change(module: str, old: str, new: str) -> tuple[Change, ...]:
    return (Change(module=f"parallel.{module}", old=old, new=new),)


ORDERS_AND_PARTS = (
    Mutant(
        name="gathered-from-the-last-rank-on",
        stands_for="B-59's kin: a list of parts that was built from its end",
        modes=_INNER,
        changes=_change("communication.collectives", _JOIN, "return torch.cat(parts.chunk(axis.size)[::-1], dim)"),
        kills="activations",
        phase="forward",
        region="embedding|head|layers.0.attention*",
        cause=_MOVED,
    ),
    Mutant(
        name="slice-of-the-following-rank",
        stands_for="B-64: Megatron e4bbb6fe7d, an index that counts from one where it counts from zero",
        modes={"tp-sp": "positions=learned", "msp": "embedding=hidden", "fsp": "embedding=hidden", "isp": ""},
        changes=_change(
            "communication.collectives", _OWN, _OWN.replace("axis.rank * width", "(axis.rank + 1) % axis.size * width")
        ),
        kills="activations",
        phase="forward",
        region="embedding",
        cause=_MOVED,
    ),
    Mutant(
        name="scattered-from-the-last-rank-on",
        stands_for="B-59's kin: parts that are sent in the order of a reversed list",
        modes={
            "tp-sp": "positions=rope",
            "msp": "embedding=vocab positions=rope",
            "fsp": "embedding=vocab positions=rope",
        },
        changes=_change("communication.collectives", _SPLIT, f"{_SPLIT}.flip(0)"),
        kills="activations",
        phase="forward",
        region="embedding",
        cause=_MOVED,
    ),
    Mutant(
        name="weights-of-the-first-rank-on-every-one",
        stands_for="B-63, B-84: every rank loads the first part of a checkpoint",
        modes=everywhere("", TENSOR) | {"isp": "wp>1"},
        changes=_change(
            "training.loop",
            _FILLED,
            _FILLED.replace("mesh.coordinates", "{a: (0, n) for a, (_, n) in mesh.coordinates.items()}"),
        ),
        kills="activations|forward|update",
        phase="forward|data",
        region="*",
        cause="other_shard",
    ),
    Mutant(
        name="data-ranks-read-from-the-end",
        stands_for="B-60's kin: a sampler that hands the shares out in the other order",
        modes=everywhere(),
        condition="dp>1",
        changes=_change(
            "communication.batch", _READ, _READ.replace('mesh.axis("dp").rank', 'case.dp - 1 - mesh.axis("dp").rank')
        ),
        kills="forward|activations",
        phase="data|forward",
        region="|embedding",
        cause="other_shard|rows_permuted|shifted_shard",
    ),
    Mutant(
        name="labels-shifted-once-more",
        stands_for="Hugging Face: the model shifts the labels, and so does the loader",
        modes=everywhere(),
        condition="packed=false",
        changes=_change("communication.batch", _LABELS, "labels=batch.labels.roll(-1, 1).to(device),"),
        kills="forward",
        phase="data|loss",
        region="",
        cause="labels_shifted_twice",
    ),
    Mutant(
        name="queries-alone-rotated",
        stands_for="B-109: InternEvo 77c3b46's kin: one of two tensors gets its positions",
        modes=everywhere(),
        condition="positions=rope",
        changes=_change("layers.attention", _ROTATED, "q = rotate(q, table)"),
        kills="activations",
        phase="forward",
        region="layers.0.attention*",
        cause="rotated_otherwise",
    ),
    Mutant(
        name="keys-alone-rotated",
        stands_for="the same for the other one",
        modes=everywhere(),
        condition="positions=rope",
        changes=_change("layers.attention", _ROTATED, "k = rotate(k, table)"),
        kills="activations",
        phase="forward",
        region="layers.0.attention*",
        cause="rotated_otherwise",
    ),
    Mutant(
        name="norms-of-queries-and-keys-left-out",
        stands_for="Qwen3 and OLMo 2 loaded by code of a model without them",
        modes=everywhere(),
        condition="qk_norm=true",
        changes=_change(
            "layers.attention",
            "q, k = self.q_norm(q), self.k_norm(k)",
            "q, k = q + 0 * self.q_norm(q), k + 0 * self.k_norm(k)",
        ),
        kills="activations",
        phase="forward",
        region="layers.0.attention*",
        cause="normed_otherwise",
    ),
    Mutant(
        name="queries-normed-after-rotation",
        stands_for="Qwen3 norms before rotation, other code after it",
        modes=everywhere(),
        condition="qk_norm=true positions=rope",
        changes=(
            *_change("layers.attention", "q, k = self.q_norm(q), self.k_norm(k)", "pass"),
            *_change(
                "layers.attention",
                _ROTATED,
                f"{_ROTATED}\n            if self.normed:\n                q, k = self.q_norm(q), self.k_norm(k)",
            ),
        ),
        kills="activations|forward",
        phase="forward",
        region="layers.0.attention*",
        cause="",
    ),
)
