"""The first default cases of every mode: covering designs for the words of several values.

A row is a case but for its other words, which `reference.case.covering` chooses. Every two values of a row's words that
are no defaults stand in one row. Three families with two values of another word each need six rows; with three (a batch
that is delivered in two ways, or packed) eight beside the plain case, which is one. tp=4 and dp=2 exclude each other on
4 ranks, so that each needs three rows; rows that need neither have 2 ranks. The rows were found by simulated annealing
over the cost of a run; nothing depends on their being the best.
"""

from __future__ import annotations

__all__ = ["AUTOTP", "GATHERED", "INTERNEVO", "MEGATRON", "SCHEMES", "WEIGHTS_SPLIT", "WHOLE"]

MEGATRON = (
    "tp=4 kv_heads=8 family=opt activation=relu delivery=flat recompute=selective",
    "dp=2 family=llama activation=relu delivery=flat recompute=full",
    "tp=4 kv_heads=8 family=internlm2 activation=swiglu delivery=flat recompute=full",
    "tp=4 kv_heads=8 family=llama activation=swiglu positions=rope packed=true delivery=local recompute=selective",
    "dp=2 family=opt activation=swiglu positions=rope packed=true delivery=local recompute=full",
    "dp=2 family=internlm2 activation=relu positions=rope packed=true delivery=local recompute=selective",
)
INTERNEVO = (
    "tp=2 dp=1 family=llama activation=swiglu delivery=flat recompute=none",
    "dp=2 family=opt activation=relu delivery=flat recompute=selective",
    "dp=2 family=internlm2 activation=swiglu delivery=tensors recompute=selective",
    "tp=4 kv_heads=8 family=opt activation=swiglu positions=rope packed=true delivery=local recompute=selective",
    "tp=4 kv_heads=8 family=internlm2 activation=relu delivery=flat recompute=full",
    "dp=2 family=llama activation=relu positions=rope packed=true delivery=local recompute=full",
    "tp=4 kv_heads=8 family=llama activation=relu delivery=tensors recompute=selective",
    "tp=2 dp=1 family=opt activation=swiglu delivery=tensors recompute=full",
)
WEIGHTS_SPLIT = (
    "tp=4 wp=other family=internlm2 activation=relu delivery=tensors head=gather recompute=selective",
    "dp=2 wp=tp family=opt activation=relu positions=rope packed=true delivery=local head=local recompute=selective",
    "dp=2 wp=other family=llama activation=relu delivery=tensors head=local recompute=none",
    "dp=2 wp=tp family=internlm2 activation=swiglu delivery=flat head=local recompute=full",
    "tp=4 wp=other family=llama activation=swiglu positions=rope packed=true delivery=local head=gather recompute=full",
    "tp=4 wp=other family=opt activation=relu delivery=flat head=local recompute=full",
    "tp=2 dp=1 wp=tp family=llama activation=swiglu delivery=flat head=gather recompute=selective fuse_weights=true "
    "overlap=true",
    "dp=2 wp=tp family=opt activation=swiglu delivery=tensors head=gather recompute=full",
)
AUTOTP = (
    "tp=4 kv_heads=6 ffn=30 vocab=269 family=llama norm=layernorm bias=true tied=false packed=true delivery=local "
    "metric=true fuse_qkv=false fuse_mlp=true qk_norm=true overlap=false recompute=full optimizer=adamw clip=0.1",
    "tp=4 kv_heads=6 ffn=30 vocab=269 family=gpt head=sum activation=relu norm=rmsnorm bias=false "
    "recompute=selective delivery=flat attention_mask=false label_smoothing=0.1 cross_entropy=fused",
)
"""Default cases of mode=autotp in place of a list of pairs, beside a plain one: most of its code is that of another
mode, whose list has the pairs. In `deep` it has all pairs as well.
"""
GATHERED = (
    "layers=1 tp=2 cp=2 seq=16 zero=1 bucket=900 order=cp-tp recompute=full early_stop=true",
    "layers=3 steps=1 tp=1 cp=2 pp=2 last_layers=1 cp_comm=gather cp_slices=contiguous recompute=full "
    "recompute_method=block recompute_layers=2",
    "layers=1 steps=1 tp=1 cp=2 cp_comm=alltoall parity=1",
    "layers=1 steps=1 tp=1 cp=4 seq=16 cp_comm=alltoall-ring cp_inner=2",
    "layers=2 steps=1 tp=2 pp=2 schedule=gpipe first_layers=1",
    "layers=4 steps=1 tp=2 pp=2 schedule=interleaved chunks=2 group=3",
    "layers=1 steps=1 tp=2 dp=2 wp=4 dtype=float16 master=float32 scaler=static loss_scale=8",
    "layers=1 tp=1 dp=2 zero=1 dtype=float16 master=float32 grad_dtype=float32 scaler=dynamic loss_scale=8",
)
"""The same where weights are gathered. One stage gathers its second layer ahead."""
SCHEMES = (
    "layers=1 tp=2 cp=2 seq=16 zero=1 bucket=900 wgrad=deferred order=cp-tp recompute=full early_stop=true",
    "layers=2 steps=1 tp=1 cp=2 pp=2 cp_comm=gather cp_slices=contiguous recompute=full recompute_method=block "
    "recompute_layers=2",
    "layers=1 steps=1 tp=1 cp=2 cp_comm=alltoall zero=2 no_sync=true prefetch=true",
    "layers=1 steps=1 tp=1 cp=4 seq=16 cp_comm=alltoall-ring cp_inner=2",
    "layers=2 steps=1 tp=2 pp=2 schedule=gpipe first_layers=1 last_layers=1 order=pp-tp",
    "layers=4 steps=1 tp=1 pp=2 schedule=interleaved chunks=2 group=3",
    "layers=1 tp=1 dp=4 zero=3 shard=2 parity=1",
    "layers=1 steps=1 tp=1 dp=2 zero=1 dtype=float16 master=float32 scaler=static loss_scale=8",
    "layers=1 tp=1 dp=2 dtype=float16 master=float32 grad_dtype=float32 scaler=dynamic loss_scale=8 wgrad=fused",
)
"""The same of context, data and pipeline parallelism and of recomputation together."""
WHOLE = ("layers=1 steps=1 tp=2 recompute=full distribute_saved=true",)
"""What only modes have whose hidden states are whole."""
