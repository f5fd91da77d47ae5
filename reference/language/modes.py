"""The modes: schemes that split a model over ranks, one for each value of `mode=`. This is the only list of them.

This file states the words of a mode and what makes them legal. Everything else of a mode is its file in
`parallel.schemes`, which `parallel.registry` finds by its name. Sources: modes.md 2, 3, 4, 8.2.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """A way to split a model over ranks.

    system          whose it is
    heads           forms of head=, the default first
    embeddings      forms of embedding=
    sequence        hidden states are split along the sequence over tp, all layers through
    weight_axis     mesh axis over which the weights are split
    uneven          ranks may hold shares of different sizes
    broadcasts      a batch reaches the ranks by broadcasts unless the case says otherwise
    data_parallel   data ranks may share gradients, optimizer and parameters (zero=, bucket=, ...)
    stages          its layers may be the stages of a pipeline
    measures        has the metric of its system
    presets         words of its plain cases, the model of its own system first
    """

    system: str
    heads: tuple[str, ...] = ("parallel", "gather")
    embeddings: tuple[str, ...] = ("vocab", "hidden")
    sequence: bool = False
    weight_axis: str = "tp"
    uneven: bool = False
    broadcasts: bool = False
    data_parallel: bool = False
    stages: bool = False
    measures: bool = False
    presets: tuple[Mapping[str, str], ...] = ({"preset": "tiny-gpt"}, {"preset": "tiny-internlm2"})

    @property
    def gathers_weights(self) -> bool:
        """Are weights split over an axis of their own, and whole only while they are used?"""
        return self.weight_axis == "wp"


def _megatron(*, sequence: bool) -> Mode:
    return Mode(
        system="Megatron-Core",
        embeddings=("vocab",),
        sequence=sequence,
        broadcasts=True,
        data_parallel=True,
        stages=True,
    )


def _internevo(**more: Any) -> Mode:
    presets = ({"preset": "tiny-internlm2"}, {"preset": "tiny-gpt"})
    plain = {"system": "InternEvo", "measures": True, "stages": True, "data_parallel": True, "presets": presets}
    return Mode(**{**plain, **more})


MODES: dict[str, Mode] = {
    "tp": _megatron(sequence=False),
    "tp-sp": _megatron(sequence=True),
    "mtp": _internevo(),
    "msp": _internevo(sequence=True),
    "fsp": _internevo(sequence=True),
    "isp": _internevo(heads=("exchange", "local", "gather"), sequence=True, weight_axis="wp"),
    "autotp": Mode(
        system="DeepSpeed",
        heads=("gather", "sum"),
        embeddings=("whole",),
        uneven=True,
        presets=({"family": "opt"}, {"family": "llama"}),
    ),
}
"""Value of `mode=` -> what it is."""


def mode_of(values: Mapping[str, Any]) -> Mode:
    """The mode of a case's values; for an unknown word, which a rule refuses, that of tp."""
    return MODES.get(values["mode"], MODES["tp"])


def whose(holds: Callable[[Mode], bool]) -> str:
    """The modes of which this holds, as a user writes them: "tp|tp-sp"."""
    return "|".join(name for name, mode in MODES.items() if holds(mode))
