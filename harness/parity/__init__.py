"""Parity: two launches of one program compared by the values that were recorded of them."""
