"""torch 2.13.0: the gradient of cross entropy with class weights and ignored labels, of logits split over classes.

python docs/findings/torch_ignored_labels.py        exit status 1 while the defect is there
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy

RANKS = 2


def rank_main(rank, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    generator = torch.Generator().manual_seed(0)
    logits, weight = torch.randn(4, 6, generator=generator), torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0, 1.0])
    answers = []
    for labels in torch.tensor([[0, 5, 2, 1], [0, -100, 2, 1]]):
        whole, split = logits.clone().requires_grad_(), distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
        cross_entropy(whole, labels, weight=weight).backward()
        try:
            with loss_parallel():
                cross_entropy(split, labels, weight=weight).backward()
                answer = f"{split.grad.full_tensor().norm():.4f}"
        except RuntimeError as error:
            answer = str(error)
        answers.append((labels.tolist(), answer, f"{whole.grad.norm():.4f}"))
    if rank == 0:
        torch.save(answers, f"{folder}/answers")
    dist.destroy_process_group()


if __name__ == "__main__":
    print("torch", torch.__version__.partition("+")[0])
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (folder,), nprocs=RANKS)
        answers = torch.load(f"{folder}/answers")
    for labels, answer, right in answers:
        print(f"labels {labels}: norm of the gradient {answer}, right {right}")
    sys.exit(any(answer != right for _, answer, right in answers))
