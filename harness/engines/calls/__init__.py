"""Collectives: arguments, the signature that all ranks must share, arithmetic, calls in flight, callers."""
