"""Checkpoints in the format of `torch.distributed.checkpoint`: written by every rank, read at any other layout.

    folder/.metadata             torch's: every tensor's global shape, its chunks, and where each lies; written last
    folder/data-N/rank-R/        what rank R wrote, as torch's own writer writes it
    folder/data-N/sums.json      the bytes and the SHA-256 of every file of these

Keys and what lies under them: `parallel.checkpoints.state`. The page: docs/checkpoints.md.
"""
