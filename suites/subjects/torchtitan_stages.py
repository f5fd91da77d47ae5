"""torchtitan's llama3 in stages of its own pipeline, with tp and FSDP2, or with its sequence split over cp. Compared
with the same model in one process. Needs torchtitan 0.3.

shardproof run "pp=2 dp=2 micro=4" --subject shardproof.suites.subjects.torchtitan_stages:subject
"""

import torch

from shardproof import Shard
from shardproof.suites.subjects import torchtitan

titan = torchtitan.subject  # its module makes torchtitan take the CPU; the imports below read that

from torchtitan.distributed.context_parallel import prepare_context_parallel_input  # noqa: E402
from torchtitan.distributed.pipeline_parallel import pipeline_llm  # noqa: E402

LENGTH, VOCAB = torchtitan.LENGTH, torchtitan.VOCAB


def subject(case, device):
    degrees = {"tensor_parallel_degree": case.tp, "context_parallel_degree": case.cp, "spmd_backend": case.backend}
    degrees |= {"pipeline_parallel_degree": case.pp, "pipeline_parallel_microbatch_size": 2}
    parallelism = torchtitan.ParallelismConfig(**degrees, pipeline_parallel_schedule=case.schedule)
    model, parallelize = torchtitan.dense(case, parallelism)
    dims = torchtitan.ParallelDims.from_config(parallelism, case.world_size)
    dtypes = dict.fromkeys(("mixed_precision_param", "mixed_precision_reduce"), case.dtype)
    words = {"training": torchtitan.TrainingConfig(local_batch_size=2 * case.micro, **dtypes)}
    words |= {"compile_config": torchtitan.CompileConfig(enable=False), "ac_config": None, "dump_folder": ""}
    words |= {"parallel_dims": dims, "parallelism": parallelism}
    dp_rank, context = case.axis_rank("dp", torch.distributed.get_rank()), torchtitan.utils.get_spmd_context
    loss_of = torchtitan.CrossEntropyLoss.Config(global_vocab_size=VOCAB).build()
    if case.pp > 1:
        more = {"device": device, "model_config": model, "parallelize_fn": parallelize, "loss_fn": loss_of}
        schedule, stages, first, last = pipeline_llm(model, **words, **more)
    else:
        stages = [parallelize(model, **words)]
    weights = {name: weight for stage in stages for name, weight in stage.named_parameters()}
    outcome, optimizer = {}, torch.optim.AdamW(weights.values(), lr=0.01)
    count = torch.tensor(2 * LENGTH * case.micro * case.dp)
    for step in range(case.steps):
        optimizer.zero_grad()
        batches = []
        for micro in range(case.micro):
            generator = torch.Generator().manual_seed(case.samples(step, micro, dp_rank, 2).start)
            tokens = torch.randint(VOCAB, (2, LENGTH + 1), generator=generator)
            batch = tokens[:, :-1], tokens[:, 1:], {"positions": torch.arange(LENGTH).expand(2, -1)}
            batches.append(
                prepare_context_parallel_input(*batch, dims.get_mesh("cp"), device) if case.cp > 1 else batch
            )
        with context(parallel_dims=dims)():
            losses = []
            if case.pp > 1:
                inputs, labels, keywords = zip(*batches, strict=True)
                given = {"arg_mbs": [(one,) for one in inputs]} if first else {}
                given |= {"target_mbs": list(labels), "losses": losses} if last else {}
                loss_kwargs = {"global_valid_tokens": count}
                schedule.step(**given, kwarg_mbs=list(keywords), loss_kwargs=loss_kwargs, return_outputs=False)
            for inputs, labels, keywords in batches if case.pp == 1 else ():
                loss, _ = loss_of(stages[0](inputs, **keywords), labels, count)
                loss.backward()
                losses.append(loss)
        if losses:
            total = sum(getattr(one, "to_local", one.clone)().detach() for one in losses)
            if case.dp > 1:
                torch.distributed.all_reduce(total, group=dims.get_mesh("batch").get_group())
            outcome[f"loss/{step}"] = Shard(total, (), ())
        outcome |= {f"grad/{name}": weight.grad.clone() for name, weight in weights.items() if step == 0}
        optimizer.step()
    return outcome | {f"param/{name}": weight.detach() for name, weight in weights.items()}


def refuses(case):
    if case.pp > 1 and (case.cp > 1 or case.layers < case.pp):
        return "has stages of one layer at least, and no cp beside them"
    return ""


subject.truth, subject.session, subject.harmless, subject.refuses = titan.truth, titan.session, titan.harmless, refuses
subject.words = {"kind": "llama3", "backend": titan.words["backend"], "schedule": "1F1B", "heads": 0, "layers": 2}
subject.words |= {"micro": 4}
subject.cases = ("pp=2 dp=2", "pp=4 layers=4")
