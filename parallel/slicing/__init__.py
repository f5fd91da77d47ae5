"""Tensor slicing as DeepSpeed does it, as pure functions of shapes: which rows or columns of a weight each rank holds.

    held          how many elements of a dim each rank holds, and which ranges of them, put together from parts
    heads         attention: heads of each rank, and the order in which a fused weight holds query, key and value
    strided       DeepSpeed's two copies by shapes alone (`strided_copy`, `copy`), and the scales of quantised weights
    families      the tensors of a layer by model family, and how each is cut
    words         the words of a slice: `family=opt hidden=768 heads=12 tp=2`
    slices        every tensor of a model, and what each rank holds of it
    checkpoint    the inverse of a slice; a checkpoint cut and put together again

A `Slice` has a `parallel.communication.layout.Placement`: `shard` cuts by it, `gather` puts together. Nothing here is
distributed. Source: DeepSpeed 0.19.8, `module_inject/auto_tp.py`, `tp_shard.py`, `fusedqkv_utils.py`, `containers/`
(modes.md 8, experts.md 27).
"""
