"""Texts that break a rule of experts, latent attention or further predictions, each with the rule."""

LATENT = "kv_lora_rank=12 positions=rope kv_heads=8"
OF_PARTS = {
    "experts=1": "is 0, or at least 2 to choose from",
    "mode=autotp experts=8": "mode=autotp has none; layers of mode=tp|tp-sp|mtp|msp|fsp|isp may have them",
    "mode=isp experts=8 recompute=full": "computes experts again before the weights of their layer are gathered"
    " in mode=isp",
    "experts=8 dense_layers=2": "leaves none of layers=2 to experts",
    "experts=4 top_k=5": "must be at most experts=4",
    "experts=8 top_k=1": "gives the only chosen expert the weight 1, and the router no gradient (top_k=1)",
    "experts=8 router_scale=0.0": "must be a positive number",
    "experts=8 global_loss=0.1": "counts tokens of other data ranks, whose choices the dense model has not made yet"
    " (routing=learned)",
    "experts=8 capacity=1.0 pad=true capacity_of=micro-batch": "has every rank send as many rows, and"
    " capacity_of=micro-batch lets ranks compete",
    "experts=8 balance_of=counted": "is about balance losses, and the case has none",
    "experts=8 balance_of=counted global_loss=0.1 routing=equal": "is of aux_loss and z_loss; sequence_loss and"
    " global_loss are of all",
    "experts=8 capacity=-1.0": "must be 0 or a positive number",
    "experts=8 dtype=float32": "compares choices exactly, and rounding in dtype=float32 makes other ones",
    "experts=8 shared_gate=true": "is for a shared expert, and shared_ffn=0 has none",
    "experts=8 routing=skewed router_dtype=float32": "must not be narrower than dtype=float64",
    "experts=8 router_groups=3": "must divide experts=8",
    "experts=8 router_groups=2 kept_groups=4": "of 2 groups must share top_k=2 evenly, at most 4 a group",
    "experts=8 routing=skewed router_groups=2": (
        "changes what the router chooses, and routing=skewed leaves it no choice"
    ),
    "experts=8 bias_rate=0.1": "is added to sigmoids, and router=softmax has none",
    "experts=8 router=sigmoid bias_rate=0.1 save=x": "changes a bias that no checkpoint of save= holds",
    "experts=8 pad=true": "is about rows beyond a capacity, and capacity=0.0 takes all",
    "experts=8 capacity=1.0 routing=skewed dtype=float32": (
        "compares weights exactly, and rounding in dtype=float32 makes others the smallest"
    ),
    "experts=8 capacity=1.0 pad=true dispatcher=allgather": "is about rows, and dispatcher=allgather sends none",
    "experts=8 expert_ffn=15": "must be a multiple of etp=2",
    "experts=8 shared_ffn=15": "must be a multiple of tp=2",
    "experts=6 ep=3 tp=2": "ep*etp=6 must divide the 2 ranks of a stage",
    "experts=8 seq=15": "each of tp=2 ranks sends an equal part of the 15 tokens of a row that it holds",
    "experts=8 order=tp-dp ep=2 dp=2": "must name ep, whose size is 2 (where experts are numbered)",
    "experts=8 init=shard": "draws dense weights alone, and layers with experts have others",
    "experts=8 recompute=full early_stop=true": "is not implemented for layers with experts",
    "experts=8 zero=2 dp=4 shard=2": "shares parameters among ranks of dp, and experts have copies on others",
    "top_k=3": "is about experts, and experts=0 has none",
    "kv_lora_rank=-1": "must not be negative",
    "q_lora_rank=8": "is about latent attention, and kv_lora_rank=0 has none",
    "mode=mtp kv_lora_rank=12": "mode=mtp has no latent attention (mode=tp|tp-sp)",
    f"{LATENT} qk_rope_dim=3": "rope rotates pairs",
    "kv_lora_rank=12 positions=rope heads=8 kv_heads=2": "latent attention has a key and a value for each of heads=8",
    f"{LATENT} qk_norm=true": ("is of each head, and latent attention has norms of its latents"),
    f"{LATENT} latent_down=column q_lora_rank=7": ("must be a multiple of tp=2 (latent_down=column)"),
    "kv_lora_rank=13 positions=rope kv_heads=8 latent_down=column": (
        "with qk_rope_dim=4 must be a multiple of tp=2 (latent_down=column)"
    ),
    f"{LATENT} cp=2 seq=8 v_head_dim=13": "must be at most 12, as wide as the key that context ranks exchange with it",
    "experts=8 dropout=0.1 random=stateful": (
        "draws masks that ranks alone know, and choices of the router, whose rows are sent, follow them"
    ),
    "prediction_depth=-1": "must not be negative",
    "prediction_depth=1 prediction_weight=-1.0": "must be 0 or a positive number",
    "prediction_weight=0.5": "weighs the loss of further tokens, and prediction_depth=0 predicts none",
    "prediction_depth=40": "must be below seq=32",
    "prediction_depth=1 pp=2": "predicts on the last pipeline stage, and the table of positions is on the first",
    "mode=isp tied=false prediction_depth=1": "mode=isp predicts no further tokens (mode=tp|tp-sp)",
    "experts=7 ep=2 dp=2": "must be a multiple of ep=2",
    "kv_lora_rank=12 kv_heads=8": "latent attention has rotary keys beside its latent",
    "experts=8 dense_layers=-1": "must not be negative",
    "experts=8 pp=2 dp=2 ep=2 etp=1 order=tp-pp-dp-ep": (
        "numbers other stages for experts than for dense weights; pp last does not"
    ),
}
"""Text of a case -> the rule that it breaks."""
