"""The core of a case: modes, the words of model, data and training, and what follows from them. Features add theirs.

Sizes count elements: `seq` tokens of a sequence, `batch` sequences of a micro-batch, `micro` micro-batches of a step.

A mode is a scheme that splits a model over ranks, one for each value of `mode=`; `MODES` is the only list of them. Here
are the words of a mode and what makes them legal. Everything else of a mode is in `parallel.schemes`, where
`parallel.subject` finds it by its name. Sources: modes.md 2, 3, 4, 8.2.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from shardproof.reference.language.groups import Groups, Layout, RankOrder
from shardproof.reference.language.words import DATA, MODEL, SPLIT, TRAFFIC, TRAINING, Problem, word

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """A way to split a model over ranks.

    system          whose it is
    heads           forms of head=, the default first
    embeddings      forms of embedding=
    sequence        hidden states are split along the sequence over tp, through all layers
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
        """Whether weights are split over an axis of their own, and whole only while they are used."""
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
"""Value of `mode=` -> what it means."""


def mode_of(values: Mapping[str, Any]) -> Mode:
    """The mode of a case's values; for an unknown word, which a rule refuses, tp."""
    return MODES.get(values["mode"], MODES["tp"])


def whose(holds: Callable[[Mode], bool]) -> str:
    """The modes for which this holds, as a user writes them: "tp|tp-sp"."""
    return "|".join(name for name, mode in MODES.items() if holds(mode))


def mlp_width(hidden: int, ratio: float, multiple_of: int) -> int:
    """InternEvo's feed-forward width: `int(hidden * ratio)` rounded up to `multiple_of` (FeedForward)."""
    return -(-int(hidden * ratio) // multiple_of) * multiple_of


def _ffn(v: Mapping[str, Any]) -> int:
    return mlp_width(v["hidden"], 8 / 3, 8) if v["activation"] == "swiglu" else 4 * v["hidden"]


def _wp(v: Mapping[str, Any]) -> int:
    return int(v["tp"]) if mode_of(v).gathers_weights else 1


def _embedding(v: Mapping[str, Any]) -> str:
    embeddings = mode_of(v).embeddings
    return "hidden" if "hidden" in embeddings and not v["tied"] else embeddings[0]


class Core:
    """The words that every case has. A feature is a class that extends this one (`reference.features`)."""

    order_names: ClassVar[tuple[str, ...]] = ()
    """Every axis that `order` may name, the fastest of the default order first; given where the features are found."""

    if TYPE_CHECKING:

        def __getattr__(self, word: str) -> Any:
            """A word of a feature, or a property that follows from it: features are found by name when the case is
            imported.
            """

    preset: str = word(
        "tiny-gpt", "a named model; words of the case override its own", domain=(), group=SPLIT, dense="tiny-gpt"
    )
    mode: str = word(
        "tp",
        "how the work is split: Megatron's tp, tp-sp; InternEvo's mtp, msp, fsp, isp; DeepSpeed's autotp",
        legal=MODES,
        dense="tp",
    )
    tp: int = word(
        2, "tensor-parallel ranks; in mode=isp the ranks that split the sequence", domain=(1, 2, 4), axis=10, dense=1
    )
    dp: int = word(1, "data-parallel ranks", domain=(1, 2, 4), axis=40)
    wp: int = word(
        1,
        "ranks that split the weights in mode=isp; divides tp*dp",
        domain=(1, 2, 4),
        follows=("mode", "tp"),
        value=_wp,
        dense=1,
    )
    order: str = word(
        "",
        "how ranks are numbered: axes, the fastest first (Megatron's rank order)",
        legal=", each once, joined by -; an axis of one rank may be left out",
    )
    family: str = word(
        "gpt",
        "architecture: its defaults, how rows of data are filled, whether the vocabulary is padded",
        legal=("gpt", "internlm2", "opt", "llama"),
        group=MODEL,
    )
    layers: int = word(2, "transformer layers", domain=(1, 2))
    hidden: int = word(64, "width of the hidden states")
    heads: int = word(8, "query heads; divides hidden")
    kv_heads: int = word(
        2, "key and value heads; divides heads", domain=(8, 12, 2), follows=("heads",), value=lambda v: v["heads"]
    )
    activation: str = word(
        "gelu", "activation of the MLP; swiglu has a gate and an up projection", legal=("gelu", "swiglu", "relu")
    )
    ffn: int = word(256, "inner width of the MLP", follows=("hidden", "activation", "family"), value=_ffn)
    vocab: int = word(509, "tokens of the vocabulary, padding not counted", domain=(512, 509))
    positions: str = word("learned", "a table of positions, or rotary embedding", legal=("learned", "rope"))
    norm: str = word("layernorm", "LayerNorm with bias, or RMSNorm", legal=("layernorm", "rmsnorm"))
    bias: bool = word(True, "linear layers have biases")
    tied: bool = word(True, "the head shares the weight of the token embedding")
    qk_norm: bool = word(False, "norms over each query and key head")
    fuse_qkv: bool = word(True, "one projection for query, key and value")
    fuse_mlp: bool = word(False, "one projection for gate and up (activation=swiglu)")
    seq: int = word(32, "tokens of a sequence", group=DATA)
    batch: int = word(2, "sequences of a micro-batch, on each data rank", domain=(1, 2))
    micro: int = word(2, "micro-batches of a step", domain=(1, 2, 3))
    data: str = word(
        "", "file to read: text, JSONL, Megatron .bin/.idx, InternEvo .bin/.meta", legal="a path, no spaces"
    )
    embedding: str = word(
        "vocab",
        "the token table is split by rows (vocab) or by columns (hidden), or whole (mode=autotp)",
        legal=("vocab", "hidden", "whole"),
        group=TRAFFIC,
        follows=("mode", "tied", "family"),
        value=_embedding,
        dense="vocab",
    )
    head: str = word(
        "parallel",
        "parallel: a loss of split logits; gather: whole logits on every rank; isp: exchange, gather or local; "
        "autotp: gather (training) or sum (inference)",
        legal=("parallel", "gather", "exchange", "local", "sum"),
        follows=("mode",),
        value=lambda v: mode_of(v).heads[0],
        dense="parallel",
    )
    cross_entropy: str = word(
        "unfused",
        "one all-reduce for each term of the loss, or one for all",
        legal=("unfused", "fused"),
        dense="unfused",
    )
    fuse_weights: bool = word(False, "gather the weights of a layer in one call (mode=isp)", dense=False)
    overlap: bool = word(True, "collectives run while the rank computes; false awaits each at once", dense=True)
    metric: bool = word(
        False, "accuracy and perplexity of every micro-batch (InternEvo), with collectives of their own"
    )
    steps: int = word(2, "optimizer steps", domain=(1, 2, 3), group=TRAINING)
    optimizer: str = word("sgd", "SGD, or AdamW with decoupled weight decay 0.01", legal=("sgd", "adamw"))
    lr: float = word(1.0, "learning rate", legal="a positive number", domain=(1.0, 0.1))
    clip: float = word(0.0, "largest gradient norm; 0 is off", legal="0 or a positive number", domain=(0.0, 0.1))
    label_smoothing: float = word(
        0.0, "share of a label that is spread over the other tokens", legal="in [0, 1)", domain=(0.0, 0.1)
    )
    dtype: str = word(
        "float64",
        "dtype of parameters, activations and collectives",
        legal=("float64", "float32", "bfloat16", "float16"),
    )
    load: str = word("", "begin with the checkpoint in this folder, of any layout", legal="a path, no spaces")
    save: str = word("", "save a checkpoint in this folder after the last step", legal="a path, no spaces")
    seed: int = word(0, "seed of weights and data", legal="0 .. 2**64 - 1")
    variant: str = word("", "a real system's known deviation from the right mathematics: the run must fail", domain=())

    def problems(self) -> Iterator[Problem]:
        """Key, the rule that it breaks and a legal value, of every rule of a feature that the case breaks."""
        yield from ()

    @property
    def block_count(self) -> int:
        """The number of transformer layers, those after the decoder among them."""
        return self.layers

    @property
    def blocks(self) -> dict[str, int]:
        """Dotted name of every transformer layer -> the layer of the decoder that it is like, in forward order."""
        return {f"layers.{layer}": layer for layer in range(self.layers)}

    @property
    def truth_depends_on_split(self) -> bool:
        """Whether the dense model needs to know how the work is split."""
        return False

    @property
    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """The parameters that features add to a layer, without its prefix, with their shapes."""
        return {}

    def behind_layer(self, x_BSH: "Tensor", _weights: "Callable[[str], Tensor]") -> "Tensor":
        """Hidden states of the dense model when they leave a layer; `_weights` gives one of `layer_shapes` by name."""
        return x_BSH

    def replaced_branches(self, _layer: int) -> dict[str, str]:
        """The branch of this layer, "attention" or "mlp", that a feature replaces -> the feature.

        Its parameters and mathematics are in `reference.model.branches.FEATURE`, its module is that of
        `Parts.branches`.
        """
        return {}

    @property
    def behind_decoder(self) -> tuple[str, ...]:
        """The features that continue from the decoder's normed hidden states, beside the head.

        Their parameters and mathematics are in `reference.model.branches.FEATURE`, their modules those of
        `Parts.behind_head`.
        """
        return ()

    @property
    def units_behind(self) -> tuple[str, ...]:
        """The modules after the decoder, each of which recompute=full recomputes as one unit."""
        return ()

    @property
    def embeds_behind(self) -> bool:
        """Whether something after the decoder embeds tokens."""
        return False

    @property
    def repeating_layers(self) -> tuple[int, int]:
        """(number of first layers that differ from the rest, layers of a unit among the rest)."""
        return 0, 1

    @property
    def system(self) -> Mode:
        """The mode of this case; for an unknown word, which a rule refuses, tp."""
        return MODES.get(self.mode, MODES["tp"])

    @property
    def named_axes(self) -> dict[str, int]:
        """Axis -> its ranks, for every axis that an order may name, in the default order; one rank without a word."""
        return {axis: getattr(self, axis, 1) for axis in type(self).order_names}

    @property
    def mesh(self) -> dict[str, int]:
        """Mesh axis -> its ranks, in the default order: the words that are the size of an axis."""
        return {axis: size for axis, size in self.named_axes.items() if hasattr(self, axis)}

    @property
    def world_size(self) -> int:
        """Ranks of the mesh."""
        return math.prod(self.mesh.values())

    @property
    def head_dim(self) -> int:
        """Width of one attention head: of its query and key."""
        return self.hidden // self.heads

    @property
    def value_dim(self) -> int:
        """Width of one attention head's value."""
        return self.head_dim

    @property
    def rotated_dim(self) -> int:
        """Features of a head's query and key that rotary positions turn."""
        return self.head_dim

    @property
    def padded_vocab(self) -> int:
        """Rows of the sharded vocabulary: gpt pads to a multiple of 128 * tp (Megatron), the others never pad.

        Under isp of 128 * lcm(tp, wp): tp splits the logits, wp the weights. autotp splits `vocab` and pads nothing.
        """
        if self.family != "gpt":
            return self.vocab
        unit = 128 * math.lcm(self.tp, self.wp)
        return -(-self.vocab // unit) * unit

    @property
    def tokens(self) -> int:
        """The number of tokens of a micro-batch on a data rank."""
        return self.batch * self.seq

    @property
    def slice_tokens(self) -> int:
        """The number of tokens of a micro-batch on a context rank; all of the data rank's if rows are not sliced."""
        return self.tokens

    @property
    def data_axis(self) -> str:
        """The mesh axis of the ranks that hold the same weights and see different tokens."""
        return "wdp" if self.system.gathers_weights else "dp"

    def data_axis_of(self, _parameter: str) -> str:
        """The mesh axis of the ranks that hold the same part of a parameter and see different tokens."""
        return self.data_axis

    @property
    def token_axis(self) -> str:
        """The mesh axis of the ranks that see different tokens."""
        return "dp"

    @property
    def layout(self) -> Layout:
        """The rank orders over this case's ranks, by its `order`; gathered weights have an order of their own."""
        sizes = self.mesh
        ranks = RankOrder.of(self.order, self.named_axes)
        ranks = RankOrder(tuple((axis, size) for axis, size in ranks.axes if axis in sizes))
        own = [RankOrder((("wp", self.wp), ("wdp", ranks.world // self.wp)))] if self.system.gathers_weights else []
        return Layout(orders=(ranks, *own))

    @property
    def axes(self) -> dict[str, Groups]:
        """Mesh axis -> the rank lists of its groups, by the case's `order`; `checkpoint`, if saved, has all ranks."""
        lists = self.layout.lists()
        return {**lists, "checkpoint": (tuple(range(self.world_size)),)} if self.save else lists

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Mesh axis -> ranks in each of its groups, as `axes` has them, without listing ranks."""
        return self.layout.sizes

    def axis_rank(self, axis: str, rank: int) -> int:
        """The place of a global rank in its group along an axis, as in `axes`. Raises KeyError for an unknown axis."""
        return self.layout.place(axis, rank)
