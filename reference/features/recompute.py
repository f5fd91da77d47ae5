"""Recomputation: what backward recomputes instead of saving. Its words and what makes them legal.

Sources: Megatron-Core 0.16.1 `TransformerConfig`, which refuses to distribute inputs that are split already (around.md
16). Its uniform method fails if the layers are no whole number of units.
"""

import math
from collections.abc import Iterator

from shardproof.reference.errors import CaseError
from shardproof.reference.language.core import Core, whose
from shardproof.reference.language.words import Problem, not_default, word


class Recompute(Core):
    """A case whose backward may recompute some activations; by default none, with recompute=full layer by layer."""

    recompute: str = word(
        "none",
        "what backward computes again: nothing, the attention core, whole layers",
        legal=("none", "selective", "full"),
        after="fuse_weights",
        dense="none",
    )
    recompute_method: str = word(
        "uniform",
        "recompute=full: all layers in equal units, or the first of every stage",
        legal=("uniform", "block"),
        dense="uniform",
    )
    recompute_layers: int = word(
        1, "layers of a unit (recompute_method=uniform), or of a stage (block)", domain=(1, 2), dense=1
    )
    distribute_saved: bool = word(
        False, "tensor-parallel ranks share the saved inputs of units (mode=tp|mtp)", dense=False
    )
    early_stop: bool = word(
        False, "recompute ends with the last tensor that backward needs (torch's default)", dense=False
    )

    @property
    def core_again(self) -> bool:
        """Whether backward recomputes the attention core, and nothing else."""
        return self.recompute == "selective"

    @property
    def layers_again(self) -> bool:
        """Whether backward recomputes layers."""
        return self.recompute == "full"

    @property
    def repeating_layers(self) -> tuple[int, int]:
        """(number of first layers that save something other than the rest, layers of a unit among the rest)."""
        return (self.recompute_layers, 1) if self.recompute_method == "block" else (0, self.recompute_layers)

    def problems(self) -> Iterator[Problem]:
        """Every broken rule: its word, the rule and a legal value."""
        mode, name, size = self.system, self.mode, self.recompute_layers
        for key, legal in not_default(Recompute, self) if not self.layers_again else ():
            if key != "recompute":
                rule = f"is a form of recompute=full, and recompute={self.recompute} computes no layer again"
                yield key, rule, legal
        if self.recompute_method == "uniform":
            for count in self._layers_of_stages():
                if count % size:
                    rule = f"must divide the {count} layers of a stage (recompute_method=uniform)"
                    yield "recompute_layers", rule, f"recompute_layers={math.gcd(count, size)}"
            if mode.gathers_weights and size > 1:
                rule = f"mode={name} shares the gathered weights of one layer between recompute and backward"
                yield "recompute_layers", f"{rule} (recompute_method=uniform)", "recompute_layers=1"
        if self.distribute_saved and (mode.sequence or mode.uneven):
            owners = whose(lambda one: not one.sequence and not one.uneven)
            rule = "splits them already" if mode.sequence else "has no equal parts of them"
            yield (
                "distribute_saved",
                f"is for hidden states that are whole (mode={owners}); mode={name} {rule}",
                "distribute_saved=false",
            )

    def _layers_of_stages(self) -> set[int]:
        """The numbers of layers of the stages; empty if stages cannot share the layers, which another rule refuses."""
        try:
            return {layers.stop - layers.start for chunks in self.stage_layers for layers in chunks}  # len() overflows
        except CaseError:
            return set()
