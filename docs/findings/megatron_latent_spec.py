"""Megatron-Core 0.16.1 and 0.19.2: the local spec of latent attention cannot be built without TransformerEngine.

python docs/findings/megatron_latent_spec.py        exit status 1 while the defect is there
"""

import sys
import tempfile
import warnings
from importlib.metadata import version

import torch
import torch.distributed as dist

with warnings.catch_warnings(action="ignore"):
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import MLATransformerConfig
    from megatron.core.transformer.spec_utils import build_module

if __name__ == "__main__":
    print("megatron-core", version("megatron-core"))
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        words = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8}
        words |= {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "rope_type": "rope"}
        config = MLATransformerConfig(**words, use_cpu_initialization=True)
        torch.cuda.current_device = lambda: torch.device("cpu")
        layer = get_gpt_layer_local_spec(multi_latent_attention=True)
        try:
            build_module(layer.submodules.self_attention, config=config, layer_number=1)
        except TypeError as error:
            print(f"TypeError: {error}; right: no error")
            sys.exit(1)
