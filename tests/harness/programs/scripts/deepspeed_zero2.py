"""DeepSpeed ZeRO-2 as its users write it: two micro-batches a step, gradients reduced to their owners, AdamW.

Its op for shared memory, which only its inference calls, would be compiled at the first start, for minutes. Without the
op DeepSpeed takes gloo, as on platforms where it is not to be had.
"""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from deepspeed import comm as dist
from torch import nn

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 100},
    "zero_allow_untested_optimizer": True,
}


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(3):
        for _ in range(2):
            loss = engine(torch.randn(2, 8)).square().mean()
            engine.backward(loss)
            engine.step()
        if dist.get_rank() == 0:
            print(f"loss {loss.item():.17g} norm {engine.get_global_grad_norm():.17g}", flush=True)
    dist.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
