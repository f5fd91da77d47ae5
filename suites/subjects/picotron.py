"""picotron's Llama as its train.py trains it, over tp, cp, dp and pp, compared with itself on one rank. Two defects
(FINDINGS.md) are mended here: gradients are also summed over cp without dp, and divided by micro-batches with pp.

PICOTRON=checkout shardproof run "pp=2 mended=false" --subject shardproof.suites.subjects.picotron:subject
"""

import functools
from types import SimpleNamespace

import torch

from shardproof import Shard, softmax_shift
from shardproof.suites.subjects.checkout import checkout, fill, on_cpu, tokens_of

with checkout("PICOTRON", stand_ins="flash_attn wandb datasets"):  # none of these is called here
    import train
    from picotron import process_group_manager
    from picotron.context_parallel.context_parallel import apply_context_parallel
    from picotron.data_parallel.data_parallel import DataParallelBucket
    from picotron.model import Llama
    from picotron.pipeline_parallel import pipeline_parallel as stages
    from picotron.tensor_parallel.tensor_parallel import ColumnParallelLinear, apply_tensor_parallel

SIZES = {"hidden_size": 32, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 40}
SIZES |= {"vocab_size": 48, "num_hidden_layers": 3, "max_position_embeddings": 12}
COLUMNS = ("q_proj", "k_proj", "v_proj", "up_proj", "gate_proj", "embedding", "final_proj")
ROWS = ("out_proj", "down_proj")


def place_shard(case, name, tensor):  # as apply_tensor_parallel splits it
    kind, offsets, shape = name.split(".")[-2], [0] * tensor.dim(), list(tensor.shape)
    if kind in COLUMNS + ROWS:
        dim, place = int(kind in ROWS), process_group_manager.process_group_manager.tp_rank
        offsets[dim], shape[dim] = place * shape[dim], case.tp * shape[dim]
    return Shard(tensor, tuple(offsets), tuple(shape))


def build(case):  # in the order of train.py
    config = SimpleNamespace(**SIZES, rms_norm_eps=1e-5, rope_theta=1e4)
    model = Llama(config)
    if case.tp > 1:
        model = apply_tensor_parallel(model)
    if case.pp > 1:
        model = stages.PipelineParallel(model, config)
    for layer in model.modules():
        if isinstance(layer, ColumnParallelLinear):
            layer.async_all_reduce = case.overlap
    model = apply_context_parallel(model).to(getattr(torch, case.dtype))
    for name, weight in model.named_parameters():
        fill(case, name, [place_shard(case, name, weight.data)])
    return DataParallelBucket(model) if case.dp > 1 or (case.mended and case.cp > 1) else model


def batches(case, step):  # what its loader gives: a part of the sequences over cp
    ranks = process_group_manager.process_group_manager
    for micro in range(case.micro):
        tokens = tokens_of(case.samples(step, micro, ranks.dp_rank, 2))
        ids, targets = (one.chunk(case.cp, 1)[ranks.cp_rank] for one in (tokens[:, :-1], tokens[:, 1:]))
        yield {"input_ids": ids, "target_ids": targets, "position_ids": torch.arange(12)}


class Loader:
    """The micro-batches of a step."""

    def __init__(self, case, step):
        self.grad_acc_steps, self.batches = case.micro, batches(case, step)

    def __next__(self):
        """The next of them."""
        return next(self.batches)


def subject(case, device):
    process_group_manager.setup_process_group_manager(case.tp, case.cp, case.pp, case.dp)
    model, outcome = build(case), {}
    optimizer, plain = torch.optim.SGD(model.parameters(), lr=0.1), getattr(model, "module", model)
    for step in range(case.steps):
        optimizer.zero_grad()
        loader, shapes = Loader(case, step), (2, 12 // case.cp, SIZES["hidden_size"])
        if case.pp > 1:
            train_step = getattr(stages, f"train_step_pipeline_{case.schedule}")
            loss = train_step(model, loader, shapes, device, getattr(torch, case.dtype))
        else:
            loss = train.train_step(model, loader, device)
        loss = train.average_loss_across_dp_cp_ranks(loss, device)
        if process_group_manager.process_group_manager.pp_is_last_stage:
            outcome[f"loss/{step}"] = Shard(torch.tensor(loss), (), ())
        for name, weight in plain.named_parameters():
            if case.pp > 1 and case.mended:
                weight.grad /= case.micro
            if step == 0:
                outcome[f"grad/{name}"] = place_shard(case, name, weight.grad.clone())
        optimizer.step()
        if plain is not model:
            model.reset()
    return outcome | {
        f"param/{name}": place_shard(case, name, weight.data) for name, weight in plain.named_parameters()
    }


subject.truth, subject.harmless = "alone", softmax_shift
subject.session = functools.partial(
    on_cpu, FLASH_ATTEN="0", DEVICE="cpu", DTYPE="float32", LOCAL_RANK="0", CONTEXT_PARALLEL="0"
)
subject.words = {"schedule": ("1f1b", "afab"), "mended": True, "overlap": False, "dtype": "float32"}
subject.per_rank = ("picotron.process_group_manager",)
subject.refuses = lambda case: "" if case.dtype == "float32" else "computes its norms in float32"
subject.cases = ("tp=2 dp=2", "tp=2 cp=2")
