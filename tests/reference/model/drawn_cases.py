"""Small dense models of every family for hypothesis: the words that change what the reference computes."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from reference.case import Case
from reference.case.presets import FAMILIES


@st.composite
def models(draw: st.DrawFn, /, **fixed: Any) -> Case:
    """A small model on one rank; `fixed` words override what would be drawn."""
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    head_dim = draw(st.sampled_from((4, 6)))
    family = draw(st.sampled_from(tuple(FAMILIES)))
    words: dict[str, Any] = {
        "mode": "mtp",
        "tp": 1,
        "family": family,
        "layers": draw(st.integers(1, 2)),
        "heads": kv_heads * group,
        "kv_heads": kv_heads,
        "hidden": kv_heads * group * head_dim,
        "ffn": draw(st.sampled_from((8, 15))),
        "vocab": draw(st.sampled_from((11, 2, 37))),
        "seq": draw(st.integers(2, 7)),
        "batch": draw(st.integers(1, 3)),
        "positions": draw(st.sampled_from(("rope", "learned"))),
        "norm": draw(st.sampled_from(("layernorm", "rmsnorm"))),
        "bias": draw(st.booleans()),
        "tied": draw(st.booleans()),
        "qk_norm": draw(st.booleans()),
        "fuse_qkv": draw(st.booleans()),
        "label_smoothing": draw(st.sampled_from((0.0, 0.1))),
        "seed": draw(st.integers(0, 2**31 - 1)),
    } | fixed
    if words.setdefault("activation", FAMILIES[family]["activation"]) == "swiglu":
        words.setdefault("fuse_mlp", draw(st.booleans()))
    return Case.of(**words)
