"""Checkpoints in the format of `torch.distributed.checkpoint`: written by every rank, read at any other layout.

    folder/.metadata             torch's: every tensor's global shape, its chunks, and where each lies; written last
    folder/__R_0.distcp          what rank R wrote, as torch names it

Keys and what lies under them: `parallel.checkpoints.state`. The page: docs/checkpoints.md.
"""
