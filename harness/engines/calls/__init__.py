"""What a collective is: its arguments, the signature that all ranks must share, its arithmetic, and calls in flight."""
