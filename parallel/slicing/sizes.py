"""How many elements of a dim each rank holds, by DeepSpeed's AutoTP rule.

    follows kv heads    the tensor is no MLP's and no head's, and the kv heads divide the dim: ranks get whole kv heads
                        with their query heads, the first ranks one more when the heads do not divide evenly
    nearly even         otherwise: multiples of `grain` elements, the first ranks one grain more, the last rank also the
                        rest below a grain; a dim shorter than a grain is divided by single elements

The sizes always sum to the dim. Source: DeepSpeed 0.19.8 `module_inject/tp_shard.py` get_shard_size (modes.md 8.2,
experts.md 27.3). There a name is looked for anywhere in the module's path ("self_attn.w1proj" counts as an MLP's), and
the head is known by its bare name. Here both are whole parts of the path.
"""

from parallel.slicing.errors import SliceError

_MLP = frozenset({"mlp", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""Parts of a module's path that mark an MLP: its features belong to no head."""
_HEADS = frozenset({"lm_head", "embed_out"})
"""Last part of the path of a language model's head."""


def follows_heads(name: str) -> bool:
    """Whether a tensor of this dotted module name is divided by kv heads where they divide it."""
    parts = name.split(".")
    return _MLP.isdisjoint(parts) and parts[-1] not in _HEADS


def even_shares(total: int, ranks: int) -> tuple[int, ...]:
    """`total` things over `ranks`, the first ones one more each: (3, 3, 2, 2) for 10 over 4."""
    return tuple(total // ranks + (rank < total % ranks) for rank in range(ranks))


def shard_sizes(
    total: int, ranks: int, *, kv_heads: int | None = None, grain: int = 1, name: str = ""
) -> tuple[int, ...]:
    """The elements of each rank of a dim of `total` elements; 0 is possible (see `nonempty`).

    `name` is the dotted module name ("mlp.down_proj"). Raises SliceError for sizes below 1.
    """
    for key, value in (("total", total), ("ranks", ranks), ("grain", grain), ("kv_heads", kv_heads or 1)):
        if value < 1:
            raise SliceError(key, value, "must be at least 1", f"{key}=1")
    if kv_heads and total % kv_heads == 0 and follows_heads(name):
        return tuple(share * (total // kv_heads) for share in even_shares(kv_heads, ranks))
    if total < grain:
        return even_shares(total, ranks)
    *sizes, last = (share * grain for share in even_shares(total // grain, ranks))
    return (*sizes, last + total % grain)


def nonempty(sizes: tuple[int, ...], key: str, value: int) -> tuple[int, ...]:
    """Return the sizes. Raises SliceError, about the word `key=value`, when a rank would hold nothing."""
    if 0 in sizes:
        rank = sizes.index(0)
        rule = f"leaves rank {rank} of {len(sizes)} with nothing"
        raise SliceError(key, value, rule, f"{key}={_legal(key, sizes)}")
    return sizes


def _legal(key: str, sizes: tuple[int, ...]) -> int:
    return sum(size > 0 for size in sizes) if key in ("tp", "ranks") else len(sizes)
