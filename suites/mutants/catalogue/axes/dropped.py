"""Dropout on context ranks and pipeline stages: masks of other steps or stages (around.md 14.2, 25)."""

from __future__ import annotations

from suites.mutants.catalogue.axes.pipelines import STAGES
from suites.mutants.mutant import TENSOR, Change, Mutant, Words, everywhere

__all__ = ["DROPPED"]

_RATES: Words = {"dropout": 0.2, "attention_dropout": 0.3}
_RING: Words = {**_RATES, "cp": 2, "seq": 48, "metric": False}
_RINGS = everywhere("", (*TENSOR, "isp"))
_STAGES = everywhere("", ("tp", "tp-sp"))


def _change(module: str, old: str, new: str) -> tuple[Change, ...]:
    return (Change(module=f"parallel.{module}", old=old, new=new),)


DROPPED = (
    Mutant(
        name="context-one-mask-for-every-step-of-the-ring",
        stands_for="around.md 14.2: masks of shares differ per rank and step, and the own block's serves for all",
        modes=_RINGS,
        suite=_RING,
        changes=_change(
            "context.ring",
            "slices.visible(own, keys), of_keys(keep, keys))",
            "slices.visible(own, keys), of_keys(keep, own))",
        ),
        kills="activations",
        phase="forward",
        region="layers.0.attention*",
    ),
    Mutant(
        name="context-masks-replayed-in-another-order",
        stands_for="around.md 14.2: masks are replayed by the steps of backward, which begins with another block",
        modes=_RINGS,
        suite=_RING,
        changes=_change(
            "context.ring",
            "visible, factors = slices.visible(own, keys), of_keys(keep, keys)",
            "visible, factors = slices.visible(own, keys), of_keys(keep, slices.held[_owner(axis, -1 - step)])",
        ),
        kills="activation_gradients",
        phase="backward",
        region="layers.?.attention*",
    ),
    Mutant(
        name="stages-number-their-layers-from-zero",
        stands_for="around.md 11.3, 25: masks by the number of a layer in its stage: stages drop alike",
        modes=_STAGES,
        suite={**_RATES, **STAGES},
        changes=_change(
            "randomness.dropout",
            "self.case.seed,\n                site,",
            'self.case.seed,\n                site.replace("layers.2.", "layers.0.") if self.at["pp"][0] else site,',
        ),
        kills="masks",
        phase="forward",
        region="layers.2.*",
    ),
    Mutant(
        name="stages-drop-by-the-backward-before",
        stands_for="around.md 16: a recomputation under 1F1B takes the streams as the newest forward left them",
        modes=_STAGES,
        suite={**_RATES, **STAGES, "random": "stateful", "recompute": "full"},
        changes=_change(
            "randomness.dropout",
            "self.streams.rewound(self.streams.state_dict())",
            "_Newest(self.streams)",
        )
        + _change(
            "randomness.dropout",
            "@dataclass(frozen=True, slots=True, kw_only=True)\nclass Dropout:",
            "class _Newest:\n"
            "    last: dict[str, Tensor] = {}\n\n"
            "    def __init__(self, streams: Streams) -> None:\n"
            "        self.streams = streams\n"
            "        _Newest.last = streams.state_dict()\n\n"
            "    def __enter__(self) -> None:\n"
            "        self.rewound = self.streams.rewound(_Newest.last)\n"
            "        self.rewound.__enter__()\n\n"
            "    def __exit__(self, *error: object) -> None:\n"
            "        self.rewound.__exit__(*error)\n\n\n"
            "@dataclass(frozen=True, slots=True, kw_only=True)\nclass Dropout:",
        ),
        kills="activation_gradients",
        phase="backward",
        region="layers.*",
    ),
    Mutant(
        name="stages-share-streams",
        stands_for="around.md 11.3: Megatron's seeds without 100 * pp_rank, and stages draw the same masks",
        modes=_STAGES,
        suite={**_RATES, "random": "stateful", **STAGES},
        changes=_change("randomness.streams", "100 * pp_rank + CONTEXT_STRIDE", "CONTEXT_STRIDE"),
        kills="masks",
        phase="forward",
        region="layers.2*",
    ),
)
