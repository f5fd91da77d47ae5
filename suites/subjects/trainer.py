"""A recipe as the subject: TrainingArguments and a Trainer of transformers, as a team has them in a file of its own.

shardproof run "dp=3 clip=0.5" --subject shardproof.suites.subjects.trainer:subject

`recipe` is the team's own: what it says of accumulation, tokens, clipping and decay is what is proved. `subject` adds
callbacks that read, and nothing else. accelerate deals batches out to data ranks in turn, so that the samples of a step
are those of `case.samples`. The truth is a loop in plain torch over all batches of a step.
"""

import tempfile

import torch
import torch.distributed as dist
import transformers
from torch.nn.functional import cross_entropy

VOCAB, TOKENS, ROWS = 40, 9, 2  # of a row, and rows of a micro-batch


def model_of(case):
    sizes = {"vocab_size": VOCAB, "n_positions": TOKENS, "n_embd": 16, "n_layer": 1, "n_head": 4, "use_cache": False}
    config = transformers.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model = transformers.GPT2LMHeadModel(config)
    for seed, weight in enumerate(model.parameters(), 1000 * case.seed):
        draws = torch.Generator().manual_seed(seed)
        weight.data = torch.randn(weight.shape, generator=draws, dtype=torch.float64).mul_(0.3)
    return model.to(getattr(torch, case.dtype))


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):  # random tokens, of which the first ones are a prompt
    def __init__(self, case):
        self.case = case

    def __len__(self):
        return self.case.steps * self.case.micro * self.case.dp * ROWS

    def __getitem__(self, number):
        draws = torch.Generator().manual_seed(number)
        tokens = torch.randint(VOCAB, (TOKENS,), generator=draws)
        prompt = int(torch.randint(1, TOKENS - 1, (), generator=draws))
        return {"input_ids": tokens, "labels": torch.where(torch.arange(TOKENS) < prompt, -100, tokens)}


def loss_of(outputs, labels, num_items_in_batch=None):  # in the dtype of the logits; the mean over all tokens of a step
    logits, labels = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / num_items_in_batch


def recipe(case, folder, callbacks):
    batches = {"per_device_train_batch_size": ROWS, "gradient_accumulation_steps": case.micro, "max_steps": case.steps}
    quiet = {"logging_strategy": "no", "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    arguments = transformers.TrainingArguments(
        **{"output_dir": folder, "use_cpu": True, "seed": case.seed, **batches, **quiet},
        **{"learning_rate": 0.01, "lr_scheduler_type": "constant"},
        weight_decay=0.1,
        max_grad_norm=case.clip,
        average_tokens_across_devices=True,
        train_sampling_strategy="sequential",
        ddp_find_unused_parameters=False,
    )
    given = {"train_dataset": Rows(case), "compute_loss_func": loss_of, "callbacks": callbacks}
    return transformers.Trainer(model_of(case), arguments, **given)


class Read(transformers.TrainerCallback):  # what the optimizer is given in step 0, and what it leaves
    def __init__(self):
        self.outcome, self.losses = {}, []

    def on_pre_optimizer_step(self, args, state, control, model=None, **more):
        self.outcome |= {f"clipped/{n}": w.grad.clone() for n, w in named(model) if state.global_step == 0}

    def on_train_end(self, args, state, control, model=None, **more):
        self.outcome |= {f"param/{n}": w.detach() for n, w in named(model)}


def named(model):  # DDP is around it
    return [(name.removeprefix("module."), weight) for name, weight in model.named_parameters()]


def subject(case, device):
    read = Read()
    with tempfile.TemporaryDirectory() as folder:
        trainer = recipe(case, folder, [read])
        backward = trainer.accelerator.backward

        def note(loss, **more):  # DDP averages gradients, so the Trainer's losses are dp times as large
            backward(loss, **more)
            read.losses.append(loss.detach() / case.dp)
            if len(read.losses) == case.micro:
                read.outcome |= {f"grad/{name}": weight.grad.clone() for name, weight in named(trainer.model)}

        trainer.accelerator.backward = note
        trainer.train()
    dist.all_reduce(totals := torch.stack(read.losses).unflatten(0, (case.steps, case.micro)).sum(1))
    return read.outcome | {f"loss/{step}": total for step, total in enumerate(totals)}


def truth(case, device):
    model, rows, outcome = model_of(case), Rows(case), {}
    matrices, others = ([w for w in model.parameters() if (w.dim() < 2) is other] for other in (False, True))
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others}], 0.01, weight_decay=0)
    for step in range(case.steps):
        parts = [case.samples(step, micro, rank, ROWS) for micro in range(case.micro) for rank in range(case.dp)]
        batches = [[rows[number] for number in part] for part in parts]
        tokens, labels = (torch.stack([row[key] for b in batches for row in b]) for key in ("input_ids", "labels"))
        optimizer.zero_grad()
        loss = loss_of(model(tokens), labels, (labels[:, 1:] != -100).sum())
        loss.backward()
        outcome |= {f"grad/{name}": weight.grad.clone() for name, weight in named(model) if step == 0}
        torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip or torch.inf)
        outcome |= {f"clipped/{name}": weight.grad.clone() for name, weight in named(model) if step == 0}
        outcome[f"loss/{step}"] = loss.detach()
        optimizer.step()
    return outcome | {f"param/{name}": weight.detach() for name, weight in named(model)}


subject.truth, subject.per_rank = truth, ("accelerate.state",)
subject.words, subject.cases = {"micro": 2, "clip": 0.0}, ("dp=3", "dp=2 clip=0.5", "dp=4 dtype=float32")
subject.refuses = lambda case: "data-parallel alone" if case.world_size > case.dp else ""
