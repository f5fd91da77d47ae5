"""One line of the closed form of a method: calls of one layer and micro-batch on one rank."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Transfer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """`calls` equal calls; payload in bytes as in the ledger. `wide`: in the dtype of statistics, else the tensors'.
    `hidden`: it can travel while a product is computed.

    `axis` is the level of a method that talks over two: "outer" or "inner", else "".
    """

    phase: str
    op: str
    payload_bytes: int
    calls: int = 1
    reduce_op: str = ""
    wide: bool = False
    hidden: bool = False
    axis: str = ""
