"""Cases that every scheme of the split is held to, a table for each feature; `deep` ones are left to that profile."""

from __future__ import annotations

from dataclasses import dataclass

from reference.case import Case
from reference.language.modes import MODES

METHODS, ORDERS = (Case.legal_words()[word] for word in ("cp_comm", "cp_slices"))


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseTable:
    """Words that all cases share, the cases, those left to the profile `deep`, and the checks that must be made."""

    sizes: str
    cases: tuple[str, ...]
    deep: tuple[str, ...] = ()
    checks: frozenset[str]


SGD, ADAMW = "lr=0.1", "optimizer=adamw lr=0.01 clip=0.05"
HALF = "dtype=float16 master=float32 lr=0.01"
CHUNKS = "schedule=interleaved chunks=2"
PACKED = "family=internlm2 packed=true qk_norm=true"

DATA_PARALLEL = CaseTable(
    sizes="layers=2 heads=6 kv_heads=3 hidden=24 ffn=42 vocab=389 seq=9 batch=2 micro=3 steps=3",
    cases=(
        f"mode=tp tp=3 dp=2 bucket=2000 wgrad=fused parity=2 {SGD}",
        f"mode=fsp tp=3 dp=2 zero=1 bucket=900 wgrad=deferred {ADAMW} qk_norm=true fuse_qkv=false tied=false",
        f"mode=tp-sp tp=3 dp=2 zero=2 no_sync=true {SGD} recompute=full order=dp-tp",
        f"mode=tp tp=1 dp=3 zero=3 prefetch=true recompute=full recompute_method=block {ADAMW}",
        f"mode=tp tp=1 dp=4 zero=3 shard=2 {SGD} recompute=selective positions=rope activation=swiglu",
        f"mode=isp tp=3 dp=2 wp=2 zero=1 bucket=900 {ADAMW} tied=false",
        f"mode=tp tp=1 dp=3 layers=1 {HALF} zero=1 grad_dtype=float32 scaler=static loss_scale=8",
    ),
    deep=(
        tuple(
            f"mode={mode} tp={tp} dp={dp} zero={zero} {training} tied={tied} {words}"
            for mode, tp, dp in (("tp", 3, 2), ("tp-sp", 3, 2), ("tp", 1, 3))
            for zero, words in ((0, "bucket=700"), (1, "bucket=0"), (1, "bucket=700 overlap=false"), (2, ""), (3, ""))
            for training, tied in ((SGD, "true"), (ADAMW, "false"))
        )
        + tuple(
            f"mode=tp-sp tp=3 dp=2 layers=1 {HALF} zero={zero} grad_dtype={grad} {words}"
            for zero in (0, 1, 2, 3)
            for grad, words in (("model", "scaler=static loss_scale=8"), ("float32", "scaler=dynamic optimizer=adamw"))
        )
        + tuple(
            f"mode={mode} tp=3 dp=2 {SGD} {words}"
            for mode in ("tp", "tp-sp", "mtp", "msp", "fsp")
            for words in (
                "bucket=700 wgrad=fused parity=2",
                "zero=1 bucket=700 wgrad=deferred recompute=full",
                "zero=2 prefetch=true parity=1",
                "zero=3 prefetch=true recompute=full recompute_layers=2",
                "zero=3 no_sync=true prefetch=true tied=false",
                "bucket=700 dtype=bfloat16 master=float32 grad_dtype=float32 wgrad=fused parity=1",
            )
        )
        + tuple(
            f"mode=isp {words}"
            for words in (
                f"tp=3 dp=2 wp=2 bucket=700 parity=2 {SGD}",
                f"tp=3 dp=2 wp=6 zero=1 bucket=700 {SGD} recompute=full",
                f"tp=1 dp=4 wp=2 zero=1 {ADAMW} fuse_weights=true positions=rope activation=swiglu",
                f"tp=3 dp=2 wp=2 layers=1 {HALF} zero=1 grad_dtype=float32 scaler=dynamic",
                f"tp=1 pp=2 dp=2 wp=2 zero=1 bucket=700 {SGD}",
            )
        )
    ),
    checks=frozenset({"ledger", "parameter_gradients", "gradient_norm", "update"}),
)

PIPELINE = CaseTable(
    sizes="heads=6 kv_heads=3 hidden=24 ffn=42 vocab=389 seq=9 batch=2 steps=3",
    cases=(
        f"mode=tp tp=1 pp=4 layers=5 first_layers=2 micro=3 {SGD}",
        f"mode=tp tp=1 pp=4 layers=4 micro=5 schedule=gpipe tied=false {ADAMW}",
        f"mode=tp-sp tp=3 pp=2 layers=3 last_layers=2 micro=3 {ADAMW}",
        f"mode=tp tp=3 pp=2 layers=3 last_layers=1 micro=1 schedule=gpipe qk_norm=true positions=rope {ADAMW}",
        f"mode=tp tp=1 pp=2 dp=2 order=pp-dp layers=3 first_layers=1 micro=5 {ADAMW}",
        f"mode=tp-sp tp=3 pp=2 layers=2 micro=3 delivery=flat head=gather recompute=selective tied=false {SGD}",
        f"mode=tp tp=1 pp=2 dp=3 layers=3 first_layers=1 micro=3 zero=1 bucket=900 {ADAMW}",
        f"mode=tp tp=1 pp=2 dp=3 layers=3 first_layers=1 micro=3 zero=3 no_sync=true prefetch=true parity=2 {ADAMW}",
        f"mode=tp tp=1 pp=2 dp=3 layers=2 micro=2 {HALF} zero=1 grad_dtype=float32 scaler=static loss_scale=8",
        f"mode=tp tp=1 pp=3 layers=6 micro=3 {CHUNKS} metric=true {SGD}",
        f"mode=tp tp=1 pp=2 layers=6 first_layers=4 micro=5 {CHUNKS} group=3 {ADAMW}",
        f"mode=fsp tp=1 pp=3 dp=2 layers=4 last_layers=2 micro=2 packed=true family=internlm2 zero=1 {ADAMW}",
        f"mode=isp tp=1 dp=2 wp=2 pp=2 layers=3 first_layers=2 micro=3 recompute=full recompute_method=block {ADAMW}",
    ),
    deep=(
        f"mode=isp tp=1 dp=2 wp=2 pp=2 layers=8 micro=4 {CHUNKS} tied=true embedding=vocab metric=true {ADAMW}",
        f"mode=isp tp=3 wp=3 pp=2 dp=2 layers=6 first_layers=4 micro=5 {CHUNKS} group=3 recompute=full bias=true {SGD}",
        f"mode=isp tp=1 dp=2 wp=2 pp=4 layers=5 first_layers=2 micro=6 overlap=false recompute=full {SGD}",
        f"mode=isp tp=1 dp=3 wp=3 pp=4 layers=6 last_layers=3 micro=2 schedule=gpipe fuse_weights=true"
        f" head=local {ADAMW}",
        f"mode=isp tp=2 dp=2 wp=4 pp=2 heads=4 kv_heads=2 vocab=392 ffn=44 seq=8 layers=4 micro=3 packed=true"
        f" family=internlm2 recompute=selective {SGD}",
        f"mode=isp tp=1 wp=2 dp=2 cp=2 pp=2 seq=8 layers=4 micro=3 recompute=full recompute_method=block dropout=0.2"
        f" attention_dropout=0.1 random=stateful init=shard tied=false delivery=flat head=gather {SGD}",
        f"mode=mtp tp=3 pp=2 dp=2 vocab=390 layers=4 micro=4 {CHUNKS} zero=1 embedding=hidden tied=false metric=true"
        f" {ADAMW}",
        f"mode=msp tp=3 pp=2 dp=2 vocab=390 layers=3 last_layers=2 micro=3 zero=1 bucket=900 tied=true {ADAMW}",
        f"mode=fsp tp=3 pp=3 vocab=390 layers=4 last_layers=2 micro=5 schedule=gpipe head=gather metric=true {SGD}",
        f"mode=tp tp=2 pp=2 dp=2 heads=4 kv_heads=2 layers=3 first_layers=2 micro=4 {SGD}",
        f"mode=tp-sp tp=2 pp=2 cp=2 heads=4 kv_heads=2 seq=16 layers=2 micro=4 zero=1 {ADAMW}",
        f"mode=tp tp=3 pp=2 dp=2 layers=3 last_layers=2 micro=3 zero=1 parity=1 {SGD}",
        f"mode=tp tp=1 pp=3 dp=2 layers=4 first_layers=1 last_layers=2 micro=4 zero=2 no_sync=true prefetch=true"
        f" parity=1 {SGD}",
        f"mode=tp-sp tp=3 pp=2 dp=2 layers=4 micro=3 zero=3 no_sync=true prefetch=true recompute=full"
        f" recompute_layers=2 {SGD}",
        f"mode=tp tp=1 pp=2 dp=4 shard=2 layers=8 micro=4 {CHUNKS} zero=3 no_sync=true prefetch=true recompute=full"
        f" recompute_method=block {ADAMW}",
        f"mode=tp tp=1 pp=2 dp=3 layers=2 micro=2 schedule=gpipe {HALF} zero=2 no_sync=true grad_dtype=float32",
        f"mode=tp-sp tp=1 pp=2 dp=3 layers=2 micro=3 packed=true delivery=local positions=rope recompute=full {SGD}",
        f"mode=tp-sp tp=1 pp=2 dp=3 layers=2 micro=3 packed=true delivery=local positions=rope zero=1 {ADAMW}",
        f"mode=tp-sp tp=3 pp=3 layers=4 first_layers=1 last_layers=1 micro=2 fuse_qkv=false activation=swiglu {ADAMW}",
        f"mode=tp tp=1 pp=5 layers=6 last_layers=2 micro=7 attention_mask=false zero=1 {SGD}",
        f"mode=tp tp=1 pp=3 dp=2 layers=7 first_layers=2 last_layers=1 micro=5 zero=1 {ADAMW}",
        f"mode=tp tp=1 pp=4 layers=8 micro=5 {CHUNKS} group=5 {ADAMW}",
        f"mode=tp tp=1 pp=4 cp=2 seq=12 layers=4 micro=2 {SGD}",
        f"mode=tp tp=1 pp=2 cp=3 seq=12 layers=2 micro=1 zero=1 {SGD}",
        f"mode=tp-sp tp=3 pp=2 cp=2 seq=12 layers=2 micro=4 zero=1 {ADAMW}",
        f"mode=tp-sp tp=3 pp=2 cp=2 seq=12 layers=4 micro=2 {CHUNKS} recompute=full {SGD}",
        f"mode=tp tp=3 pp=2 dp=2 layers=8 last_layers=2 micro=6 {CHUNKS} group=3 bucket=500 tied=false {SGD}",
        f"mode=tp-sp tp=3 pp=2 dp=2 layers=4 micro=4 {CHUNKS} zero=1 bucket=900 {ADAMW}",
        f"mode=tp-sp tp=3 pp=3 dp=2 layers=6 micro=4 {CHUNKS} group=4 delivery=flat head=gather overlap=false"
        f" bucket=700 recompute=selective tied=false {ADAMW}",
        f"mode=tp-sp tp=3 pp=2 dp=2 layers=2 micro=3 {HALF} scaler=static loss_scale=8",
        f"mode=tp-sp tp=3 pp=2 dp=2 layers=2 micro=3 {HALF} zero=1 grad_dtype=float32 scaler=dynamic optimizer=adamw",
    ),
    checks=frozenset({"ledger", "groups", "forward", "parameter_gradients", "gradient_norm", "update", "replicas"}),
)

CONTEXT = CaseTable(
    sizes="layers=2 heads=12 kv_heads=6 hidden=48 ffn=42 vocab=390 batch=2 micro=3 steps=3 lr=0.1",
    cases=(
        "tp=2 cp=2 seq=12 order=cp-tp",
        "tp=1 cp=3 seq=12 family=llama delivery=flat recompute=selective",
        f"mode=tp-sp tp=2 cp=2 seq=8 delivery=local {PACKED} cp_comm=gather bias=true",
        "tp=1 dp=2 cp=4 seq=8 order=dp-cp steps=2 cp_slices=contiguous delivery=local",
        f"mode=tp-sp tp=2 pp=2 cp=2 seq=8 order=pp-cp-tp micro=4 delivery=local {PACKED}",
        f"mode=isp tp=2 wp=2 cp=2 seq=8 {PACKED} recompute=full overlap=false",
        "tp=1 cp=4 seq=16 cp_comm=alltoall-ring cp_inner=2 kv_heads=2 attention_mask=false",
        "mode=tp-sp tp=3 cp=2 seq=12 cp_comm=alltoall heads=12 kv_heads=3 zero=1 bucket=900 ffn=30 vocab=390",
    ),
    deep=tuple(
        f"mode={mode} tp=2 dp={dp} cp={cp} seq={4 * cp} cp_comm={comm} cp_slices={order} recompute={recompute} "
        f"heads=24 kv_heads=12 {words}"
        for number, (mode, words) in enumerate(
            (
                ("tp", "delivery=flat"),
                ("tp-sp", "delivery=local " + PACKED),
                ("mtp", "tied=false embedding=hidden"),
                ("msp", PACKED),
                ("fsp", "label_smoothing=0.1"),
                ("isp", "wp=2 head=gather " + PACKED),
            )
        )
        for comm in METHODS[:3]
        for order in ORDERS
        for dp, cp, recompute in ((((1, 3, "full"), (2, 2, "selective"), (1, 2, "none"))[number % 3]),)
    )
    + tuple(
        f"mode={mode} tp=1 cp={cp} seq={4 * cp} cp_comm=alltoall-ring cp_inner={inner} {words}"
        for mode, cp, inner, words in (
            ("tp", 6, 3, "recompute=selective"),
            ("tp-sp", 6, 2, PACKED + " delivery=local"),
            ("isp", 4, 2, "wp=1"),
        )
    ),
    checks=frozenset({"ledger", "activations", "activation_gradients", "parameter_gradients", "gradient_norm"}),
)

DROPOUT = CaseTable(
    sizes="heads=12 kv_heads=6 hidden=24 ffn=36 vocab=390 seq=12 batch=2 micro=3 steps=2 lr=0.1 dropout=0.2 "
    "attention_dropout=0.3 delivery=local",
    cases=(
        "mode=tp-sp tp=2 pp=2 recompute=full random=stateful",
        "mode=isp tp=2 wp=2 recompute=full fuse_weights=true random=stateful",
        "mode=isp tp=2 cp=2 family=internlm2 packed=true micro=2 recompute=selective random=stateful",
    ),
    deep=tuple(f"mode={mode} tp=3 dp=2 random={random}" for mode in MODES for random in ("field", "stateful"))
    + tuple(
        f"{words} random={random}"
        for random in ("field", "stateful")
        for words in (
            "mode=tp-sp tp=2 dp=3 recompute=selective",
            "mode=tp tp=1 cp=4 cp_comm=alltoall-ring cp_inner=2 kv_heads=4 seq=16 dtype=bfloat16 lr=0.01",
            "mode=tp tp=1 cp=3 cp_comm=gather recompute=selective",
            "mode=tp-sp tp=2 cp=2 kv_heads=4 cp_comm=alltoall cp_slices=contiguous recompute=full",
            "mode=tp tp=1 pp=2 schedule=gpipe micro=4",
            "mode=tp-sp tp=2 dp=2 zero=1 bucket=900 optimizer=adamw lr=0.01",
            "mode=tp tp=1 dp=3 zero=2",
            "mode=tp tp=2 recompute=full early_stop=true",
            "mode=tp-sp tp=2 pp=2 schedule=interleaved chunks=2 layers=4 micro=4 recompute=full",
            "mode=tp tp=1 dp=3 zero=3 recompute=full",
            "mode=msp tp=2 family=internlm2 packed=true recompute=selective",
            "mode=tp-sp tp=2 family=opt dtype=float32",
        )
    ),
    checks=frozenset({"masks"}),
)

RECOMPUTE = CaseTable(
    sizes="heads=6 kv_heads=3 hidden=24 ffn=42 vocab=390 batch=2 micro=3 lr=0.1 recompute=full",
    cases=(
        "mode=tp tp=3 layers=4 seq=7 recompute_layers=2 distribute_saved=true optimizer=adamw lr=0.01 clip=0.05",
        "mode=tp-sp tp=3 layers=2 seq=9 dp=2 zero=3 recompute_method=block early_stop=true",
        "mode=isp tp=3 wp=2 dp=2 layers=3 seq=6 steps=1 recompute_method=block recompute_layers=2",
        "mode=tp tp=3 pp=2 layers=4 seq=7 recompute_method=block distribute_saved=true early_stop=true",
    ),
    deep=tuple(
        f"mode={mode} tp=3 layers=4 seq=12 {words} {form}"
        for mode, words in (
            ("tp", "distribute_saved=true cp=2 cp_comm=gather"),
            ("tp", "pp=2 distribute_saved=true schedule=gpipe"),
            ("tp", "dp=2 zero=2 bias=false activation=swiglu"),
            ("tp-sp", "dp=2 zero=3 qk_norm=true fuse_qkv=false"),
            ("tp-sp", "dp=2 zero=1 bucket=900 pp=1"),
            ("mtp", "distribute_saved=true tied=false embedding=hidden"),
            ("msp", "packed=true family=internlm2"),
            ("fsp", "cp=2"),
            ("autotp", "family=llama"),
        )
        for form in (
            "recompute_layers=2",
            "recompute_layers=2 early_stop=true",
            "recompute_method=block",
            "recompute_method=block recompute_layers=3 early_stop=true",
        )
    )
    + tuple(
        f"mode=isp tp=3 wp=2 dp=2 layers=3 seq=6 recompute_method=block recompute_layers={layers} {words}"
        for layers in (1, 2, 5)
        for words in ("", "overlap=false", "fuse_weights=true", "fuse_weights=true overlap=false early_stop=true")
    ),
    checks=frozenset({"ledger", "activation_gradients", "parameter_gradients"}),
)

INITIAL = CaseTable(
    sizes="layers=3 heads=6 kv_heads=2 hidden=24 ffn=36 vocab=390 seq=12 micro=2 steps=2 lr=0.1",
    cases=(
        "mode=tp-sp tp=2 dp=2 zero=1 init=shard",
        "mode=isp tp=1 dp=2 wp=2 pp=2 init=shard layers=2 tied=false",
        "tp=1 dp=2 init=field layers=1",
        "tp=2 pp=2 init=shard layers=2 tied=false dtype=bfloat16 master=float32 optimizer=adamw",  # returned wide
    ),
    checks=frozenset({"initial_values"}),
)
UNEVEN = CaseTable(
    sizes="mode=autotp layers=2 heads=10 kv_heads=5 hidden=40 ffn=37 vocab=67 seq=6 batch=2",
    cases=(
        "tp=2 dp=3 heads=4 kv_heads=2 hidden=16 ffn=32 vocab=66 packed=true family=llama recompute=full",
        "tp=3 dp=2 head=sum tied=false qk_norm=true clip=0.05",
        "tp=3 fuse_qkv=false activation=swiglu fuse_mlp=true overlap=false optimizer=adamw lr=0.01 metric=true",
        "tp=4 family=internlm2 positions=rope qk_norm=true delivery=flat dtype=bfloat16 lr=0.1",
        "tp=5 family=opt ffn=40 label_smoothing=0.1 recompute=selective",
    ),
    checks=frozenset({"forward", "parameter_gradients", "replicas", "ledger", "activations"}),
)
"""Shares of heads, inner features and tokens that differ on 2, 3 and 4 ranks."""
TABLES = {
    "data_parallel": DATA_PARALLEL,
    "pipeline": PIPELINE,
    "context": CONTEXT,
    "dropout": DROPOUT,
    "recompute": RECOMPUTE,
    "initial": INITIAL,
    "uneven": UNEVEN,
}
