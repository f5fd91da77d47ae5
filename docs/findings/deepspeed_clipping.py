"""DeepSpeed 0.19.8: without ZeRO, experts over ep are clipped by the mean of the norms of ranks with different experts.

python docs/findings/deepspeed_clipping.py      exit status 1 while the defect is there

A step of SGD with lr=1 and gradient_clipping=0.1 on 2 ranks, which see the same tokens. The change of the parameters
is the clipped gradient. Its norm, each parameter counted once, must be 0.1 in every layout.
"""

import os
import sys
import tempfile
from importlib.metadata import version

os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
import torch
import torch.distributed as dist
from torch import nn

CLIP = 0.1


def step(ep, zero):  # the norm of what one step changes
    import deepspeed  # noqa: PLC0415  (the parent needs none)
    from deepspeed.moe.layer import MoE  # noqa: PLC0415
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer  # noqa: PLC0415

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.manual_seed(1)  # MoE copies one expert: all begin alike
    experts = {"drop_tokens": False, "use_rts": False, "min_capacity": 0}
    model = nn.ModuleList([MoE(4, nn.Linear(4, 4, bias=False), 2, ep_size=ep, **experts), nn.Linear(4, 1)])
    model[0].deepspeed_moe.gate.wg.weight.data = torch.tensor([[1.0], [-1.0]]).expand(2, 4).clone()  # to expert 0
    model[1].weight.data.fill_(10.0)
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    config = {"train_micro_batch_size_per_gpu": 8, "gradient_clipping": CLIP, "zero_optimization": {"stage": zero}}
    config["zero_allow_untested_optimizer"] = True
    engine, *_ = deepspeed.initialize(None, model, torch.optim.SGD(groups, lr=1.0), config=config)
    before = [weight.detach().clone() for weight in model.parameters()]
    x = torch.rand(8, 4, generator=torch.Generator().manual_seed(1))
    engine.backward(model[1](model[0](x)[0]).square().mean())
    engine.step()
    squares = torch.zeros(2)  # of the weights that all ranks have, and of the experts
    for weight, old in zip(model.parameters(), before, strict=True):
        squares[int(not getattr(weight, "allreduce", True))] += (old - weight.detach()).square().sum()
    if ep > 1:
        dist.all_reduce(squares[1])
    return squares.sum().sqrt().item()


def rank_main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    sys.stdout = open(os.devnull, "w") if rank else sys.stdout  # noqa: SIM115
    wrong = False
    for ep, zero in ((1, 0), (2, 1), (2, 0)):
        found = step(ep, zero)
        print(f"ep={ep}, ZeRO-{zero}: the norm of the clipped gradient is {found:.4f}, right {CLIP:.4f}", flush=True)
        wrong |= abs(found - CLIP) > 1e-4
    dist.destroy_process_group()
    sys.exit(wrong)


if __name__ == "__main__":
    print("deepspeed", version("deepspeed"), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [torch.multiprocessing.get_context("spawn").Process(target=rank_main, args=(r, folder)) for r in (0, 1)]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
    sys.exit(max(one.exitcode for one in ranks))
