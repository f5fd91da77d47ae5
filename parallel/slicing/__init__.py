"""Tensor slicing as DeepSpeed does it, as pure functions of shapes: which rows or columns of a weight each rank holds.

    rows          which ranges of a dim each rank holds; its heads, and their order in a fused weight
    words         the words of a slice, `family=opt hidden=768 heads=12 tp=2`, and the tensors of a layer by family
    slices        every tensor of a model, and what each rank holds of it, also by DeepSpeed's two copies
    checkpoint    the inverse of a slice; a checkpoint cut and put together again

A `Slice` has a `parallel.communication.layout.Placement`: `shard` cuts by it, `gather` puts together. Nothing here is
distributed. Source: DeepSpeed 0.19.8, `module_inject/auto_tp.py`, `tp_shard.py`, `fusedqkv_utils.py`, `containers/`
(modes.md 8, experts.md 27).
"""
