"""Experts: layers whose MLP is replaced by several, of which a router chooses some for every token. Words and rules.

Ranks are numbered for the weights of experts as Megatron-Core numbers them: by the case's order, with other axes. `etp`
stands where tp does, `ep` in its own place, `edp` where dp does; cp is no axis of theirs. `edp` are the ranks that hold
the same part of the same experts. So tp*cp*dp ranks are etp*ep*edp ranks, and expert x lies where ep is x //
(experts/ep). Sources: Megatron-Core 0.16.1 `MoELayer` and `parallel_state` (experts.md 21, 22); arXiv:2006.16668,
2401.06066, 2408.15664, 2412.19437.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from shardproof.reference.errors import CaseError
from shardproof.reference.language.core import Core, whose
from shardproof.reference.language.groups import Layout, RankOrder
from shardproof.reference.language.rules import expert_problems
from shardproof.reference.language.words import Problem, declared_words, multiple, not_default, word

_POSITIVE = "0 or a positive number"
_OF_EXPERTS: Mapping[str, str] = {"tp": "etp", "dp": "edp"}
"""Axis of an order -> the axis in its place when ranks are numbered for experts."""


def _where_learned(key: str, plain: float) -> Callable[[Mapping[str, Any]], Any]:
    """Value of a word that follows `routing`: unchanged if the router chooses, else `plain`."""
    return lambda values: values[key] if values["routing"] == "learned" else plain


class Experts(Core):
    """A case whose layers may have experts; by default none."""

    ep: int = word(1, "ranks that share the experts of a layer among them", domain=(1, 2, 4, 3), after="dp", dense=1)
    etp: int = word(
        0,
        "ranks that split the inner features of an expert; 0: as many as tp",
        legal="0, or at least 1",
        domain=(0, 1, 2, 3),
        dense=0,
    )
    experts: int = word(
        0,
        "experts of a layer; 0: it has an MLP",
        legal="0, or at least 2",
        domain=(0, 8, 6),
        after="fuse_mlp",
        part=True,
    )
    top_k: int = word(2, "experts that a token goes to", domain=(2, 3, 1))
    expert_ffn: int = word(0, "inner width of an expert; 0: ffn", legal="0, or at least 1", domain=(0, 42))
    shared_ffn: int = word(
        0, "inner width of the expert that all tokens go to; 0: there is none", legal="0, or at least 1", domain=(0, 66)
    )
    shared_gate: bool = word(False, "what the shared expert returns is multiplied by sigmoid(x wg)")
    dense_layers: int = word(0, "first layers that keep their MLP", legal="0, or at least 1", domain=(0, 1))
    routing: str = word(
        "learned",
        "who chooses: the router, or a function of seed, layer and token that loads experts as named",
        legal=("learned", "equal", "skewed", "empty", "one"),
    )
    skew: float = word(
        0.0,
        "share of tokens that all go to the first top_k experts (routing=equal)",
        legal="sixteenths from 0 to 1",
        domain=(0.0, 0.25),
    )
    router: str = word(
        "softmax",
        "weights of the chosen experts: a softmax of them, of all experts, or shares of sigmoids",
        legal=("softmax", "pre-softmax", "sigmoid"),
    )
    router_scale: float = word(1.0, "factor on these weights", legal="a positive number", domain=(1.0, 2.5))
    router_groups: int = word(
        1,
        "groups of experts with neighbouring numbers, of which a token keeps some (routing=learned)",
        domain=(1, 4, 2),
        follows=("routing",),
        value=_where_learned("router_groups", 1),
    )
    kept_groups: int = word(
        1,
        "groups that a token keeps, those with the largest scores",
        domain=(1, 2),
        follows=("routing",),
        value=_where_learned("kept_groups", 1),
    )
    bias_rate: float = word(
        0.0,
        "step of the bias with which experts are chosen, so that all get as many tokens (router=sigmoid); 0: no bias",
        legal=_POSITIVE,
        domain=(0.0, 0.1),
        follows=("routing",),
        value=_where_learned("bias_rate", 0.0),
    )
    aux_loss: float = word(
        0.0,
        "coefficient of the balance loss of a micro-batch: 1 where all experts get as many tokens",
        legal=_POSITIVE,
        domain=(0.0, 0.1),
    )
    sequence_loss: float = word(
        0.0, "coefficient of the same loss of every row, a mean over rows", legal=_POSITIVE, domain=(0.0, 0.1)
    )
    global_loss: float = word(
        0.0,
        "coefficient of the same loss of a micro-batch of all data ranks together (routing by a function)",
        legal=_POSITIVE,
        domain=(0.0, 0.1),
    )
    z_loss: float = word(
        0.0, "coefficient of the mean square of log sum exp of the logits", legal=_POSITIVE, domain=(0.0, 0.01)
    )
    balance_of: str = word(
        "all",
        "tokens of which aux_loss and z_loss are means: all of a micro-batch, or those whose loss counts",
        legal=("all", "counted"),
    )
    capacity: float = word(
        0.0,
        "rows that an expert takes of the tokens that compete for it, as a factor on equal shares; 0: all",
        legal=_POSITIVE,
        domain=(0.0, 1.0),
    )
    capacity_of: str = word(
        "rank", "which tokens compete: those of each rank, or of the whole micro-batch", legal=("rank", "micro-batch")
    )
    drop: str = word(
        "score", "rows beyond are those of the smallest weights, or of the last tokens", legal=("score", "position")
    )
    pad: bool = word(False, "every rank sends exactly as many rows to every expert (capacity)")
    router_dtype: str = word(
        "model", "dtype of the router and of the weights that it sends", legal=("model", "float32", "float64")
    )
    dispatcher: str = word(
        "alltoall",
        "how tokens reach experts: rows for experts are exchanged, or all tokens gathered",
        legal=("alltoall", "allgather"),
        after="fuse_weights",
        dense="alltoall",
    )

    @property
    def named_axes(self) -> dict[str, int]:
        """Axis -> its ranks in the order of dense weights, where ep has one rank since it divides none of these."""
        return {**super().named_axes, "ep": 1}

    @property
    def mesh(self) -> dict[str, int]:
        """Mesh axis -> its ranks, without ep, which divides no dense weights."""
        return {axis: size for axis, size in super().mesh.items() if axis != "ep"}

    @property
    def layout(self) -> Layout:
        """The rank orders, with that of ranks that hold experts, and the ranks among which tokens are exchanged."""
        layout = super().layout
        if not self.experts:
            return layout
        joined = {**layout.joined, "etp_ep": "etp-ep"}
        if self.aux_loss or self.sequence_loss or self.capacity_of != "rank":
            joined["tp_cp"] = "tp-cp"
        if self.bias_rate or self.global_loss:
            joined["tp_cp_dp"] = "tp-cp-dp"
        return replace(layout, orders=(*layout.orders, self._order_of_experts), joined=joined)

    @property
    def _order_of_experts(self) -> RankOrder:
        """The order of ranks for experts. Raises CaseError for an order that leaves out an axis of experts."""
        stages = math.prod(self.mesh[axis] for axis in self.pipeline_axes)
        edp = self.world_size // (self.expert_parts * self.ep * stages)
        sizes = {"etp": self.expert_parts, "ep": self.ep, "edp": edp, "pp": stages}
        words = [_OF_EXPERTS.get(axis, axis) for axis in self.order.lower().split("-")]
        return RankOrder.of("-".join(axis for axis in words if axis in sizes), sizes)

    @property
    def expert_parts(self) -> int:
        """Ranks that split an expert."""
        return self.etp or self.tp

    @property
    def expert_width(self) -> int:
        """Inner features of an expert."""
        return self.expert_ffn or self.ffn

    @property
    def own_tokens(self) -> int:
        """Tokens of a micro-batch that one rank routes."""
        return self.slice_tokens // self.tp

    @property
    def most_rows(self) -> int:
        """The most rows that an expert takes from the tokens that compete for it."""
        tokens = self.own_tokens if self.capacity_of == "rank" else self.tokens
        share = tokens * self.top_k / max(self.experts, 1)
        return min(math.ceil(share * self.capacity), tokens) if self.capacity else tokens

    @property
    def truth_depends_on_split(self) -> bool:
        """Whether the truth depends on the split; it does if a rank's own tokens compete for an expert, or a loss is
        over all data ranks.
        """
        by_rank = self.capacity > 0 and self.capacity_of == "rank"
        return by_rank or self.global_loss > 0 or super().truth_depends_on_split

    @property
    def layers_with_experts(self) -> tuple[str, ...]:
        """The dotted names of the layers with experts."""
        return tuple(block for block, layer in self.blocks.items() if self.has_experts(layer))

    @property
    def repeating_layers(self) -> tuple[int, int]:
        """As in `Core.repeating_layers`; the repeating layers begin after those without experts."""
        first, unit = super().repeating_layers
        return max(first, multiple(self.dense_layers, unit)), unit

    def has_experts(self, layer: int) -> bool:
        """Whether this layer has experts."""
        return self.experts > 0 and layer >= self.dense_layers

    def replaced_branches(self, layer: int) -> dict[str, str]:
        """The replaced branches of a layer; experts replace the MLP where the layer has them."""
        return {**super().replaced_branches(layer), **({"mlp": "experts"} if self.has_experts(layer) else {})}

    def data_axis_of(self, parameter: str) -> str:
        """The data axis of a parameter; that of experts' weights is the axis of their copies."""
        return "edp" if ".mlp.experts." in parameter else super().data_axis_of(parameter)

    def problems(self) -> Iterator[Problem]:
        """Every broken rule: its word, the rule and a legal value."""
        if not self.experts:
            for key, legal in not_default(Experts, self):
                yield key, "is about experts, and experts=0 has none", legal
            return
        if self.experts < 2:
            yield "experts", "is 0, or at least 2 to choose from", "experts=2"
        if self.system.uneven:
            owners = whose(lambda mode: not mode.uneven)
            yield "experts", f"mode={self.mode} has none; layers of mode={owners} may have them", "experts=0"
        for key in ("etp", "expert_ffn", "shared_ffn", "dense_layers"):
            if getattr(self, key) < 0:
                yield key, "must not be negative", f"{key}={declared_words(Experts)[key].default}"
        if self.dense_layers >= self.layers:
            yield "dense_layers", f"leaves none of layers={self.layers} to experts", "dense_layers=0"
        yield from expert_problems(self, {name: field.default for name, field in declared_words(Experts).items()})
        yield from self._ranks()
        yield from self._beside()

    def _ranks(self) -> Iterator[Problem]:
        ep, etp, tp, weights = self.ep, self.expert_parts, self.tp, self.system.weight_axis
        if self.experts % ep:
            yield "experts", f"must be a multiple of ep={ep}", f"experts={multiple(self.experts, ep)}"
        if self.expert_width % etp:
            yield "expert_ffn", f"must be a multiple of etp={etp}", f"expert_ffn={multiple(self.expert_width, etp)}"
        if self.shared_ffn % (split := getattr(self, weights)):
            rule = f"must be a multiple of {weights}={split}"
            yield "shared_ffn", rule, f"shared_ffn={multiple(self.shared_ffn, split)}"
        ranks = self.world_size // math.prod(self.mesh[axis] for axis in self.pipeline_axes)
        if ranks % (ep * etp):
            key, size = ("etp", math.gcd(ranks // ep, etp)) if ranks % ep == 0 else ("ep", math.gcd(ranks, ep))
            yield key, f"ep*etp={ep * etp} must divide the {ranks} ranks of a stage", f"{key}={size}"
            return
        length = self.row_tokens // self.mesh.get("cp", 1)
        if not self.system.sequence and length % tp:
            rule = f"each of tp={tp} ranks sends an equal part of the {length} tokens of a row that it holds"
            yield "seq", rule, f"seq={multiple(self.seq, tp * self.mesh.get('cp', 1))}"
        try:
            own, dense = self._order_of_experts, super().layout.orders[0]
        except CaseError as error:
            axis = {experts: axis for axis, experts in _OF_EXPERTS.items()}
            legal = "-".join(axis.get(word, word) for word in error.legal.removeprefix("order=").split("-"))
            yield "order", f"{error.rule} (where experts are numbered)", f"order={legal}"
            return
        if self.pipeline_axes and own.lists()["pp"] != dense.lists()["pp"]:
            words = [word for word in self.order.lower().split("-") if word != "pp"]
            rule = "numbers other stages for experts than for dense weights; pp last does not"
            yield "order", rule, f"order={'-'.join([*words, 'pp'])}"

    def _beside(self) -> Iterator[Problem]:
        """Problems of words that are not implemented beside experts."""
        if self.random == "stateful" and self.routing == "learned":
            rule = "draws masks that ranks alone know, and choices of the router, whose rows are sent, follow them"
            yield "random", rule, "random=field"
        if self.init == "shard":
            yield "init", "draws dense weights alone, and layers with experts have others", "init=field"
        if self.system.gathers_weights and self.recompute == "full":
            rule = f"computes experts again before the weights of their layer are gathered in mode={self.mode}"
            yield "recompute", rule, "recompute=selective"
        for key in ("early_stop", "distribute_saved"):
            if getattr(self, key):
                yield key, "is not implemented for layers with experts", f"{key}=false"
        if self.shard:
            yield "shard", "shares parameters among ranks of dp, and experts have copies on others", "shard=0"
