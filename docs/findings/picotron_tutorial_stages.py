"""picotron_tutorial 8c14c92: gradients of a pipeline are grad_acc_steps times those without one.

PICOTRON_TUTORIAL=checkout python docs/findings/picotron_tutorial_stages.py    exit status 1 while the defect is there
"""

import os
import sys
import tempfile
import types

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.functional import cross_entropy

STEPS = 4


class Loader:
    grad_acc_steps = STEPS

    def __init__(self):
        self.draws = torch.Generator().manual_seed(0)

    def __next__(self):
        tokens = torch.randint(32, (2, 9), generator=self.draws)
        return {"input_ids": tokens[:, :-1], "target_ids": tokens[:, 1:], "position_ids": torch.arange(8)}


class Layer(torch.nn.Linear):
    def forward(self, x, position_ids=None):
        return super().forward(x).tanh()


def rank_main(rank, folder):
    sys.path.insert(0, os.path.join(os.environ["PICOTRON_TUTORIAL"], "step8_pipeline_parallel_1f1b"))
    torch.cuda.synchronize = lambda *_: None
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    from pipeline_parallel import PipelineParallel, train_step_pipeline_1f1b
    from process_group_manager import setup_process_group_manager

    setup_process_group_manager(1, 2, 1)
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.embedding, model.final_norm = torch.nn.Embedding(32, 16), torch.nn.LayerNorm(16)
    model.decoder_layers = torch.nn.ModuleList([Layer(16, 16), Layer(16, 16)])
    model.final_proj = torch.nn.Linear(16, 32)
    stages = PipelineParallel(model, types.SimpleNamespace(num_hidden_layers=2))
    train_step_pipeline_1f1b(stages, Loader(), (2, 8, 16), torch.device("cpu"), torch.float32)
    found = {name: weight.grad.clone() for name, weight in stages.named_parameters()}
    model.zero_grad()
    loader = Loader()
    for _ in range(STEPS):  # train_step of train.py, which imports wandb
        batch = next(loader)
        x = model.embedding(batch["input_ids"])
        for layer in model.decoder_layers:
            x = layer(x)
        logits = model.final_proj(model.final_norm(x)).flatten(0, 1)
        (cross_entropy(logits, batch["target_ids"].flatten()) / STEPS).backward()
    right = dict(model.named_parameters())
    torch.save([(found[name].norm() / right[name].grad.norm()).item() for name in found], f"{folder}/{rank}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (folder,), nprocs=2)
        factors = [one for rank in range(2) for one in torch.load(f"{folder}/{rank}")]
    print(f"gradients with a pipeline are {min(factors):.4f} to {max(factors):.4f} times those without, right 1")
    sys.exit(max(factors) > 1.01)
