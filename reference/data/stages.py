"""Keys of a micro-batch that a pipeline stage is sent, in the order of sending: Megatron's broadcasts.

    stage                       keys                                                bytes, T = rows * length
    the only one                tokens labels loss_mask attention_mask positions    28T and the mask
    the first                   tokens attention_mask positions                     16T and the mask
    the last                    labels loss_mask attention_mask                     12T and the mask
    one between                 none                                                0
    any, with prediction layers as the only one

A mask is rows * length**2 booleans; without one, attention is causal by itself. Layers that predict further tokens
embed these, so that their stage is sent everything, wherever it stands. Rows are sent whole: a context rank slices what
arrived, and the bytes do not depend on how many context ranks there are.
Source: Megatron-Core get_batch_on_this_tp_rank (around.md 12.1).
"""

from typing import TypeAlias

Form: TypeAlias = tuple[str, tuple[int, ...]]
"""Dtype and shape of a tensor."""


def sent_to_stage(
    rows: int, length: int, *, first: bool, last: bool, mask: bool, prediction: bool = False
) -> dict[str, Form]:
    """Key -> its dtype and shape, of `rows` sequences of `length` tokens, in the order of sending.

    `first` and `last` say where the stage stands, the only one is both; `prediction`: it has layers that predict
    further tokens.
    """
    begins, ends = first or prediction, last or prediction
    forms: dict[str, tuple[bool, Form]] = {
        "tokens": (begins, ("int64", (rows, length))),
        "labels": (ends, ("int64", (rows, length))),
        "loss_mask": (ends, ("float32", (rows, length))),
        "attention_mask": (mask and (begins or ends), ("bool", (rows, 1, length, length))),
        "positions": (begins, ("int64", (rows, length))),
    }
    return {key: form for key, (sent, form) in forms.items() if sent}
