"""The case: one experiment as a frozen, validated value with a one-line text form.

A case names the model, the mode, the mesh degrees, the batch, the training and the dtype. It holds no tensors and no
behaviour of any implementation: `reference` and `parallel` share it, and nothing else but parameter names.

Sizes count elements: `seq` tokens of a sequence, `batch` sequences of a micro-batch, `micro` micro-batches of a step.

    >>> str(Case.parse("mode=tp-sp tp=4 kv_heads=4 seed=3"))
    'mode=tp-sp tp=4 kv_heads=4 seed=3'
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from reference.case.layouts import layout_of
from reference.case.modes import MODES
from reference.case.presets import FOLLOWS, PRESETS, resolved
from reference.case.rules import check, check_word, legal_words, read, write
from reference.case.schemes import SCHEMES
from reference.case.words import DATA, MODEL, SPLIT, TRAFFIC, TRAINING, Meaning, described, word
from reference.errors import CaseError
from reference.groups import Groups, Layout, PipelineGroup

__all__ = ["Case", "CaseError"]

Word = int | float | bool | str
_LAYERS = "0, or at least 1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One experiment. The plain constructor fills gaps with `tiny-gpt`; `of` and `parse` know presets and families.

    Raises CaseError (a ValueError) naming the key, the value, the rule and a legal value.
    """

    preset: str = word("tiny-gpt", "a named model; words of the case override its own", group=SPLIT)
    mode: str = word(
        "tp", "how the work is split: Megatron's tp, tp-sp; InternEvo's mtp, msp, fsp, isp; DeepSpeed's autotp"
    )
    tp: int = word(2, "tensor-parallel ranks; in mode=isp the ranks that split the sequence")
    dp: int = word(1, "data-parallel ranks")
    pp: int = word(1, "pipeline stages: each holds consecutive layers")
    cp: int = word(1, "context-parallel ranks, each of which holds a slice of every row")
    cp_comm: str = word(
        "ring",
        "how attention meets the keys of other slices: they go round, are gathered, or tokens are exchanged for heads, "
        "alone or inside of a ring",
    )
    cp_inner: int = word(1, "ranks of each exchange inside of the ring (cp_comm=alltoall-ring); divides cp")
    cp_slices: str = word("zigzag", "a slice is one chunk of a row, or a chunk and its mirror (equal causal work)")
    wp: int = word(1, "ranks that split the weights in mode=isp; divides tp*dp")
    order: str = word(
        "tp-cp-ep-dp-pp",
        "how ranks are numbered: axes, the fastest first (Megatron's rank order)",
        legal="tp cp ep dp pp, each once, joined by -; an axis of one rank may be left out",
    )
    schedule: str = word("1f1b", "order of forwards and backwards on a pipeline stage (pp above 1)")
    chunks: int = word(1, "chunks of the model on every pipeline rank (schedule=interleaved)")
    group: int = word(
        0, "micro-batches in a row on each chunk (schedule=interleaved); 0: pp", legal="0, or from pp to micro"
    )
    first_layers: int = word(0, "layers of the first pipeline rank; 0: as many as the others", legal=_LAYERS)
    last_layers: int = word(0, "layers of the last pipeline rank; 0: as many as the others", legal=_LAYERS)
    family: str = word(
        "gpt", "architecture: its defaults, how rows of data are filled, whether the vocabulary is padded", group=MODEL
    )
    layers: int = word(2, "transformer layers")
    hidden: int = word(64, "width of the hidden states")
    heads: int = word(8, "query heads; divides hidden")
    kv_heads: int = word(2, "key and value heads; divides heads")
    activation: str = word("gelu", "activation of the MLP; swiglu has a gate and an up projection")
    ffn: int = word(256, "inner width of the MLP")
    vocab: int = word(509, "tokens of the vocabulary, padding not counted")
    positions: str = word("learned", "a table of positions, or rotary embedding")
    norm: str = word("layernorm", "LayerNorm with bias, or RMSNorm")
    bias: bool = word(True, "linear layers have biases")
    tied: bool = word(True, "the head shares the weight of the token embedding")
    qk_norm: bool = word(False, "norms over each query and key head")
    fuse_qkv: bool = word(True, "one projection for query, key and value")
    fuse_mlp: bool = word(False, "one projection for gate and up (activation=swiglu)")
    seq: int = word(32, "tokens of a sequence", group=DATA)
    batch: int = word(2, "sequences of a micro-batch, on each data rank")
    micro: int = word(2, "micro-batches of a step")
    packed: bool = word(False, "sequences packed into one row, with borders (InternEvo)")
    data: str = word(
        "", "file to read: text, JSONL, Megatron .bin/.idx, InternEvo .bin/.meta", legal="a path, no spaces"
    )
    delivery: str = word(
        "tensors", "how a batch reaches the ranks: one broadcast for each tensor, two for all, or read by every rank"
    )
    attention_mask: bool = word(True, "the attention mask is broadcast too (delivery=tensors or flat)")
    embedding: str = word(
        "vocab",
        "the token table is split by rows (vocab) or by columns (hidden), or whole (mode=autotp)",
        group=TRAFFIC,
    )
    head: str = word(
        "parallel",
        "parallel: a loss of split logits; gather: whole logits on every rank; isp: exchange, gather or local; "
        "autotp: gather (training) or sum (inference)",
    )
    cross_entropy: str = word("unfused", "one all-reduce for each term of the loss, or one for all")
    fuse_weights: bool = word(False, "gather the weights of a layer in one call (mode=isp)")
    recompute: str = word("none", "what backward computes again: nothing, the attention core, whole layers")
    recompute_method: str = word("uniform", "recompute=full: all layers in equal units, or the first of every stage")
    recompute_layers: int = word(1, "layers of a unit (recompute_method=uniform), or of a stage (block)")
    distribute_saved: bool = word(False, "tensor-parallel ranks share the saved inputs of units (mode=tp|mtp)")
    early_stop: bool = word(False, "recompute ends with the last tensor that backward needs (torch's default)")
    overlap: bool = word(True, "collectives run while the rank computes; false awaits each at once")
    zero: int = word(
        0,
        "what data ranks share out (ZeRO): 0 nothing, 1 the optimizer's states, 2 gradients and stored parameters too, "
        "3 parameters in use too",
        legal="0 to 3",
    )
    bucket: int = word(
        0,
        "elements that fill a bucket of gradients, which travels during backward; 0: one call after it",
        legal="0, or at least 1",
    )
    no_sync: bool = word(False, "gradients are summed in the last micro-batch of a step alone (zero=2|3)")
    prefetch: bool = word(False, "a layer is gathered while the one before it computes (zero=2|3)")
    wgrad: str = word(
        "plain", "gradients of weights by autograd, into the buffer, or after the last backward (zero=0|1)"
    )
    shard: int = word(
        0, "data ranks that share one copy of the parameters (zero=2|3); 0: all of them", legal="0, or a divisor of dp"
    )
    parity: int = word(
        0,
        "steps from one comparison of replicas by hash, in the program, to the next; 0: none",
        legal="0, or at least 1",
    )
    metric: bool = word(
        False, "accuracy and perplexity of every micro-batch (InternEvo), with collectives of their own"
    )
    steps: int = word(2, "optimizer steps", group=TRAINING)
    optimizer: str = word("sgd", "SGD, or AdamW with decoupled weight decay 0.01")
    lr: float = word(1.0, "learning rate", legal="a positive number")
    clip: float = word(0.0, "largest gradient norm; 0 is off", legal="0 or a positive number")
    dropout: float = word(0.0, "share of hidden states dropped: embedding, attention, MLP", legal="in [0, 1)")
    attention_dropout: float = word(0.0, "share of the shares of attention that is dropped", legal="in [0, 1)")
    random: str = word("field", "masks are a function of step, sample, site and place, or draws of Megatron's streams")
    init: str = word("whole", "initial values: this project's, Megatron's by place, or Megatron's drawn by each rank")
    label_smoothing: float = word(0.0, "share of a label that is spread over the other tokens", legal="in [0, 1)")
    dtype: str = word("float64", "dtype of parameters, activations and collectives")
    grad_dtype: str = word("model", "dtype in which gradients are added up and travel: the case's own, or float32")
    master: str = word("none", "copies of the parameters that the optimizer steps: none, or float32")
    scaler: str = word("none", "scale of the loss in backward (dtype=float16): none, static, or dynamic as Megatron's")
    loss_scale: float = word(1.0, "the scale of the first step", legal="a power of two, at least 1")
    load: str = word("", "begin with the checkpoint in this folder, of any layout", legal="a path, no spaces")
    save: str = word("", "save a checkpoint in this folder after the last step", legal="a path, no spaces")
    seed: int = word(0, "seed of weights and data", legal="0 .. 2**64 - 1")
    variant: str = word("", "a real system's known deviation from the right mathematics: the run must fail")

    def __post_init__(self) -> None:
        check({name: getattr(self, name) for name in _TYPES} | {"preset": self.preset})

    @classmethod
    def of(cls, **words: Word) -> Case:
        """The case that these words describe: preset first, then family, then sizes that follow other sizes."""
        values = resolved(words, _DEFAULTS)
        return cls(**values)

    @classmethod
    def parse(cls, text: str) -> Case:
        """The case written as `key=value` words in any order; later words override earlier ones.

        Raises CaseError: an unknown key, an illegal value, or words that cannot go together.
        """
        return cls.of(**cls.read_words(text))

    @classmethod
    def read_words(cls, text: str) -> dict[str, Word]:
        """The words of a text by key, whatever case they make together. Raises CaseError for an unknown key, and for a
        value that is no number where the key takes one.
        """
        words: dict[str, Word] = {}
        for said in text.split():
            key, equals, value = said.partition("=")
            if not equals or key not in _TYPES:
                raise CaseError(key, value or said, "is not a word of the case language", "one of " + " ".join(_TYPES))
            words[key] = read(key, value, _TYPES[key])
        return words

    @classmethod
    def check_words(cls, text: str) -> None:
        """Raise CaseError for each that `read_words` raises it for, and for a word that is none of those of its key."""
        for key, value in cls.read_words(text).items():
            check_word(key, value)

    def but(self, **words: Word) -> Case:
        """This case with some words changed; what follows others (wp, ffn, words about several ranks) follows again."""
        alone = [scheme.words for scheme in SCHEMES.values() if words.get(scheme.axis) == 1]
        kept = {key: value for key, value in self.words().items() if not any(key in about for about in alone)}
        return Case.of(**{**kept, **words})

    def words(self) -> dict[str, Word]:
        """The words that differ from the defaults: the shortest dict that `of` turns into this case."""
        words: dict[str, Word] = {}
        if self.preset != "tiny-gpt":
            words["preset"] = self.preset
        told = resolved(words, _DEFAULTS)
        for name in _TYPES:
            mine = getattr(self, name)
            if told[name] != mine:
                words[name] = mine
                told = resolved(words, _DEFAULTS) if name in _LEADING else {**told, name: mine}
        return words

    @classmethod
    def meanings(cls) -> tuple[Meaning, ...]:
        """Every word of the case language with its meaning, legal values and default, in the order of `str`."""
        return described(cls, {**legal_words(), "preset": tuple(PRESETS)}, FOLLOWS)

    def __str__(self) -> str:
        return " ".join(f"{key}={write(value)}" for key, value in self.words().items())

    @property
    def world_size(self) -> int:
        """Ranks: tp * dp * pp * cp."""
        return self.tp * self.dp * self.pp * self.cp

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads

    @property
    def padded_vocab(self) -> int:
        """Rows of the sharded vocabulary: gpt pads to a multiple of 128 * tp (Megatron), the others never pad.

        Under isp of 128 * lcm(tp, wp): tp splits the logits, wp the weights. Under autotp no table is padded.
        """
        if self.family != "gpt":
            return self.vocab
        unit = 128 * math.lcm(self.tp, self.wp)
        return -(-self.vocab // unit) * unit

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one data rank."""
        return self.batch * self.seq

    @property
    def slice_tokens(self) -> int:
        """Tokens of one micro-batch on one context rank: all of its data rank's without context parallelism."""
        return self.tokens // self.cp

    @property
    def repeating_layers(self) -> tuple[int, int]:
        """How many first layers save other than the rest, and how many of the rest are one unit (recompute)."""
        return (self.recompute_layers, 1) if self.recompute_method == "block" else (0, self.recompute_layers)

    @property
    def data_axis(self) -> str:
        """The mesh axis of the ranks that hold the same weights and see different tokens, context ranks included."""
        if MODES[self.mode].gathers_weights:
            return "wdp"
        return "dp_cp" if self.cp > 1 else "dp"

    @property
    def axes(self) -> dict[str, Groups]:
        """Mesh axis -> the rank lists of its groups, by the case's `order`.

        `embedding`, of a tied table, are the first and the last of several stages; `checkpoint`, if saved, everyone.
        """
        lists = self.layout.lists()
        if self.save:
            lists["checkpoint"] = (tuple(range(self.world_size)),)
        if self.pp > 1 and self.tied:
            lists["embedding"] = tuple(PipelineGroup(ranks=ranks).embedding_ranks() for ranks in lists["pp"])
        return lists

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Mesh axis -> ranks in each of its groups: what `axes` says, without listing the ranks."""
        return self.layout.sizes

    def axis_rank(self, axis: str, rank: int) -> int:
        """The place of a global rank in its group along an axis, as in `axes`. Raises KeyError for an unknown axis."""
        return self.layout.place(axis, rank)

    @property
    def layout(self) -> Layout:
        """The rank orders over this case's ranks."""
        return layout_of(self)


_TYPES: dict[str, type] = {f.name: type(f.default) for f in dataclasses.fields(Case)}
"""Every word of the case language and its type, in the order that `str` prints them."""
_LEADING = frozenset(leader for leaders in FOLLOWS.values() for leader in leaders) | {"family"}
"""Words that others follow where these are not given."""
_DEFAULTS: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(Case) if f.name != "preset"}
