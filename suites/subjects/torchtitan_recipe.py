"""A recipe as the subject: the configuration of one of torchtitan's debug models, run by torchtitan's own Trainer.

shardproof run "tp=2 dp=3" --subject shardproof.suites.subjects.torchtitan_recipe:subject

`recipe` is the team's own: what it says of optimizer, warmup, clipping, loss and recomputation is what is proved, at
the case's sizes and degrees. `ReportingTrainer` keeps gradients, losses and norms, and gives samples and first weights.
The truth is a loop in plain torch over all batches of a step. Needs torchtitan 0.3.
"""

import dataclasses
import importlib
from types import SimpleNamespace

import torch
from torch.nn.functional import cross_entropy

from shardproof import softmax_shift
from shardproof.suites.subjects.torchtitan import ParallelDims, smaller
from shardproof.suites.subjects.torchtitan_parts import IGNORED, LENGTH, draw_batch, named, session, start

from torchtitan.trainer import Trainer  # isort: skip  (the imports above make torchtitan take the CPU)

ROWS = 2  # of a micro-batch


def recipe(case):
    registry = importlib.import_module(f"torchtitan.models.{case.recipe.partition('_')[0]}.config_registry")
    config = getattr(registry, case.recipe)()
    config.lr_scheduler.total_steps = config.training.steps  # the steps of a case are the first of these
    dtypes = dict.fromkeys(("dtype", "mixed_precision_param", "mixed_precision_reduce"), case.dtype)
    sizes = {"local_batch_size": ROWS, "global_batch_size": ROWS * case.micro * case.dp, "seq_len": LENGTH}
    words = {"steps": case.steps, "disable_cuda_graphs": True, **dtypes, **sizes}
    config.training = dataclasses.replace(config.training, **words)
    degrees = {"tensor_parallel_degree": case.tp, "data_parallel_replicate_degree": min(case.replicas, case.dp)}
    config.parallelism = dataclasses.replace(config.parallelism, **degrees, enable_sequence_parallel=case.sp)
    config.model_spec.model.layers = config.model_spec.model.layers[: case.layers]
    for part in (config.model_spec.model, config.loss):
        smaller(part, set())
    return config


class ReportingTrainer(Trainer):
    def __init__(self, case):
        self.case, self.outcome, self.batches, config = case, {}, 0, recipe(case)
        config.tokenizer = SimpleNamespace(build=lambda **given: None)
        config.dataloader = SimpleNamespace(build=lambda dp_rank, **given: self.draw_batches(dp_rank))
        super().__init__(config)
        start(case, self.model_parts[0])
        self.metrics_processor.log = self.log

    def draw_batches(self, dp_rank):
        for step in range(self.case.steps):
            for micro in range(self.case.micro):
                yield draw_batch(self.case.samples(step, micro, dp_rank, ROWS))

    def init_distributed(self):  # the ranks exist already
        return ParallelDims.from_config(self.config.parallelism, self.case.world_size)

    def forward_backward_step(self, **batch):
        loss, self.batches = super().forward_backward_step(**batch), self.batches + 1
        if self.batches == self.case.micro:
            self.outcome |= {f"grad/{name}": weight.grad.clone() for name, weight in named(self.model_parts[0])}
        return loss

    def log(self, step, loss, largest, norm, **more):
        for name, number in (("loss", loss), ("grad_norm", norm)):
            self.outcome[f"{name}/{step - 1}"] = torch.tensor(number, dtype=getattr(torch, self.case.dtype))


def subject(case, device):
    trainer = ReportingTrainer(case)
    batches = trainer.batch_generator(trainer.dataloader)
    for trainer.step in range(1, case.steps + 1):
        trainer.train_step(batches)
    return trainer.outcome | {f"param/{name}": weight.detach() for name, weight in named(trainer.model_parts[0])}


def truth(case, device):
    config, outcome = recipe(case), {}
    config.model_spec.model.update_from_config(config=config)
    start(case, model := config.model_spec.model.build())
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(case.steps):
        optimizer.param_groups[0]["lr"] = 8e-4 * min((step + 1) / 2, 1 - (step - 2) / 8)  # two steps of warmup, of ten
        parts = [case.samples(step, micro, rank, ROWS) for micro in range(case.micro) for rank in range(case.dp)]
        batch, labels = draw_batch([number for part in parts for number in part])
        optimizer.zero_grad()
        logits = model(batch["input"], positions=batch["positions"]).flatten(0, 1)
        (loss := cross_entropy(logits, labels.flatten(), ignore_index=IGNORED)).backward()
        outcome |= {f"grad/{name}": weight.grad.clone() for name, weight in named(model) if step == 0}
        outcome[f"grad_norm/{step}"] = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        outcome[f"loss/{step}"] = loss.detach()
        optimizer.step()
    return outcome | {f"param/{name}": weight.detach() for name, weight in named(model)}


def refuses(case):
    if case.world_size > case.tp * case.dp:
        return "is parallel over tp and dp"
    return "sums gradients of its chunks in float32" if case.dtype == "float64" and "ce" not in case.recipe else ""


subject.truth, subject.refuses, subject.session, subject.harmless = truth, refuses, session, softmax_shift
subject.words = {"recipe": ("llama3_debugmodel_ce_loss", "llama3_debugmodel", "qwen3_debugmodel")}
subject.words |= {"layers": 2, "micro": 2, "sp": True, "replicas": 1}
subject.cases = ("tp=2 dp=3", "dp=4 replicas=2 recipe=llama3_debugmodel dtype=float32")
