"""Cases that every scheme of the split is held to, a table for each feature, beside default and drawn cases.

Numbers of ranks that divide few sizes, and layers that differ by stage.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseTable:
    """Words that all cases share, the cases, and the checks that must be made."""

    sizes: str
    cases: tuple[str, ...]
    checks: str


SGD, ADAMW = "lr=0.1", "optimizer=adamw lr=0.01 clip=0.05"
HALF = "dtype=float16 master=float32 lr=0.01"
CHUNKS = "schedule=interleaved chunks=2"
PACKED = "family=internlm2 packed=true qk_norm=true"

TABLES = {
    "data_parallel": CaseTable(
        sizes="layers=2 heads=6 kv_heads=3 hidden=24 ffn=42 vocab=389 seq=9 batch=2 micro=3 steps=2",
        cases=(
            f"mode=tp tp=3 dp=2 bucket=2000 wgrad=fused parity=2 {SGD}",
            f"mode=fsp tp=3 dp=2 zero=1 bucket=900 wgrad=deferred {ADAMW} qk_norm=true fuse_qkv=false tied=false",
            f"mode=tp-sp tp=3 dp=2 zero=2 no_sync=true {SGD} recompute=full order=dp-tp",
            f"mode=isp tp=3 dp=2 wp=2 zero=1 bucket=900 steps=1 {ADAMW} tied=false",
        ),
        checks="ledger parameter_gradients gradient_norm update",
    ),
    "pipeline": CaseTable(
        sizes="mode=tp tp=1 heads=6 kv_heads=3 hidden=24 ffn=42 vocab=389 seq=9 batch=2 steps=2",
        cases=(
            f"pp=4 layers=5 first_layers=2 micro=3 {SGD}",
            f"mode=tp-sp tp=3 pp=2 layers=3 last_layers=2 micro=3 {ADAMW}",
            f"mode=tp tp=3 pp=2 layers=3 last_layers=1 micro=1 schedule=gpipe qk_norm=true positions=rope {ADAMW}",
            f"pp=2 dp=3 layers=3 first_layers=1 micro=3 zero=3 no_sync=true prefetch=true parity=2 {ADAMW}",
            f"pp=2 dp=3 layers=2 micro=2 {HALF} zero=1 grad_dtype=float32 scaler=static loss_scale=8",
            f"pp=2 dp=3 layers=6 first_layers=4 micro=5 zero=1 steps=1 {CHUNKS} group=3 {ADAMW}",
            f"mode=fsp pp=3 dp=2 layers=4 last_layers=2 micro=2 packed=true family=internlm2 zero=1 {ADAMW}",
            f"mode=isp dp=2 wp=2 pp=2 layers=3 first_layers=2 micro=3 recompute=full recompute_method=block {ADAMW}",
        ),
        checks="ledger groups forward parameter_gradients gradient_norm update replicas",
    ),
    "context": CaseTable(
        sizes="layers=2 heads=12 kv_heads=6 hidden=48 ffn=42 vocab=390 batch=2 micro=3 steps=1 lr=0.1",
        cases=(
            "tp=1 cp=3 seq=12 family=llama delivery=flat recompute=selective",
            f"mode=tp-sp tp=2 pp=2 cp=2 seq=8 order=pp-cp-tp micro=4 delivery=local {PACKED}",
            "tp=1 cp=4 seq=16 cp_comm=alltoall-ring cp_inner=2 kv_heads=2 attention_mask=false",
            "mode=tp-sp tp=3 cp=2 seq=12 cp_comm=alltoall heads=12 kv_heads=3 zero=1 bucket=900 ffn=30 vocab=390",
        ),
        checks="ledger activations activation_gradients parameter_gradients gradient_norm",
    ),
    "dropout": CaseTable(
        sizes="heads=12 kv_heads=6 hidden=24 ffn=36 vocab=390 seq=12 batch=2 micro=3 steps=2 lr=0.1 dropout=0.2 "
        "attention_dropout=0.3 delivery=local",
        cases=(
            "mode=tp-sp tp=2 pp=2 recompute=full random=stateful",
            "mode=isp tp=2 wp=2 steps=1 recompute=full fuse_weights=true random=stateful",
            "mode=isp tp=2 cp=2 steps=1 family=internlm2 packed=true micro=2 recompute=selective random=stateful",
        ),
        checks="masks",
    ),
    "recompute": CaseTable(
        sizes="heads=6 kv_heads=3 hidden=24 ffn=42 vocab=390 batch=2 micro=3 steps=1 lr=0.1 recompute=full",
        cases=(
            "mode=tp tp=3 layers=4 seq=7 recompute_layers=2 distribute_saved=true optimizer=adamw lr=0.01 clip=0.05",
            "mode=tp-sp tp=3 layers=2 seq=9 dp=2 zero=3 recompute_method=block early_stop=true",
            "mode=isp tp=3 wp=2 dp=2 layers=3 seq=6 recompute_method=block recompute_layers=2",
            "mode=tp tp=3 pp=2 layers=4 seq=7 recompute_method=block distribute_saved=true early_stop=true",
        ),
        checks="ledger activation_gradients parameter_gradients",
    ),
    "initial": CaseTable(
        sizes="layers=3 heads=6 kv_heads=2 hidden=24 ffn=36 vocab=390 seq=12 micro=2 steps=1 lr=0.1",
        cases=(
            "mode=tp-sp tp=2 dp=2 zero=1 init=shard",
            "mode=isp tp=1 dp=2 wp=2 pp=2 init=shard layers=2 tied=false",
            "tp=2 pp=2 init=shard layers=2 tied=false dtype=bfloat16 master=float32 optimizer=adamw",  # returned wide
        ),
        checks="initial_values",
    ),
    # Shares of heads, inner features and tokens that differ on 2, 3 and 4 ranks.
    "uneven": CaseTable(
        sizes="mode=autotp steps=1 layers=2 heads=10 kv_heads=5 hidden=40 ffn=37 vocab=67 seq=6 batch=2",
        cases=(
            "tp=2 dp=3 heads=4 kv_heads=2 hidden=16 ffn=32 vocab=66 packed=true family=llama recompute=full",
            "tp=3 dp=2 head=sum tied=false qk_norm=true clip=0.05",
            "tp=3 fuse_qkv=false activation=swiglu fuse_mlp=true overlap=false optimizer=adamw lr=0.01 metric=true",
        ),
        checks="forward parameter_gradients replicas ledger activations",
    ),
    "experts": CaseTable(
        sizes="heads=4 hidden=16 ffn=24 vocab=67 seq=16 batch=2 micro=2 steps=1 experts=8 expert_ffn=12 lr=0.1",
        cases=(
            "mode=tp-sp tp=2 dp=2 ep=2 shared_ffn=8 shared_gate=true routing=skewed router_scale=2.5"
            " aux_loss=0.1 balance_of=counted",
            f"mode=tp tp=2 dp=2 ep=4 etp=1 dispatcher=allgather capacity=1.0 capacity_of=micro-batch {ADAMW}",
            "mode=tp tp=1 dp=2 cp=2 ep=2 experts=6 top_k=3 aux_loss=0.1 sequence_loss=0.1 z_loss=0.1",
            "mode=tp-sp tp=2 cp=2 pp=2 ep=2 etp=1 top_k=1 router=pre-softmax dense_layers=1 layers=3"
            " first_layers=2 capacity=0.5 pad=true",
            "mode=msp tp=2 dp=3 ep=3 etp=1 experts=6 top_k=3 router=sigmoid bias_rate=0.1 recompute=full steps=2"
            " activation=swiglu",
            f"mode=tp-sp tp=2 dp=2 ep=2 routing=one zero=1 bucket=900 parity=1 steps=2 {ADAMW}",
            "mode=tp tp=2 dp=2 top_k=3 capacity=1.0 positions=rope batch=3 micro=1",  # equal weights
            "mode=tp tp=2 dp=2 ep=1 expert_ffn=8 activation=swiglu bucket=1200 layers=1",
            "tp=1 dp=4 ep=4 routing=equal zero=1 layers=1 router=sigmoid top_k=1",  # gathers a small part
            "mode=isp tp=2 dp=2 wp=4 ep=2 etp=1 shared_ffn=8 dense_layers=1 layers=3 global_loss=0.1 routing=empty",
            "mode=tp-sp tp=2 dp=2 ep=4 etp=1 routing=equal skew=0.25 batch=4",
            f"mode=tp-sp tp=2 dp=3 ep=2 etp=1 zero=3 recompute=full dense_layers=1 {ADAMW}",  # 3 ranks, 4 experts
        ),
        checks="ledger groups routing activations parameter_gradients gradient_norm update",
    ),
    "latent": CaseTable(
        sizes="layers=2 hidden=16 heads=4 kv_heads=4 ffn=32 vocab=67 seq=16 positions=rope lr=0.1 steps=1 "
        "kv_lora_rank=12 qk_head_dim=6 v_head_dim=10",
        cases=(
            "mode=tp latent_down=duplicated tp=2 pp=2 dp=2 zero=1 bucket=500",
            "mode=tp latent_down=column q_lora_rank=8 tp=2 dp=2 zero=3",
            "mode=tp-sp latent_down=duplicated q_lora_rank=8 tp=2 cp=2",
            "mode=tp-sp latent_down=column tp=2 packed=true delivery=local",
        ),
        checks="ledger activations parameter_gradients update",
    ),
    "prediction": CaseTable(
        sizes="layers=2 hidden=16 heads=4 kv_heads=4 ffn=32 vocab=67 seq=16 lr=0.1 steps=1 prediction_depth=2",
        cases=(
            "mode=tp tp=2 steps=2 dp=2",
            "mode=tp-sp tp=2 pp=2 positions=rope tied=false schedule=interleaved chunks=2 layers=4",
            "mode=tp tp=2 recompute=full dropout=0.1 attention_dropout=0.1",
            "mode=tp tp=2 cp=2 packed=true positions=rope delivery=local dp=2",
            "mode=tp-sp tp=2 kv_lora_rank=12 q_lora_rank=8 positions=rope latent_down=column pp=2",
        ),
        checks="ledger activations parameter_gradients update",
    ),
}
