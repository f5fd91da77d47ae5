"""torchtitan's llama3, qwen3 and deepseek_v3 under its own parallelize functions: tp with sequence and loss parallel,
FSDP2, HSDP, experts with ep, prediction heads. Compared with the model before it is parallelized. Needs torchtitan 0.3.
shardproof run "tp=2 dp=2 kind=qwen3" --subject shardproof.suites.subjects.torchtitan:subject
"""

import dataclasses
import zlib
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import torch
import torchtitan.tools.utils

from shardproof import softmax_shift

torchtitan.tools.utils.device_type, torchtitan.tools.utils.device_module = "cpu", torch.cpu  # "cuda" without a GPU too

from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402  (all of these read device_type)
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import ParallelDims, full_dtensor, utils  # noqa: E402
from torchtitan.models import deepseek_v3, llama3, qwen3  # noqa: E402
from torchtitan.models.common import attention, moe  # noqa: E402

FAMILIES = {"llama3": llama3, "qwen3": qwen3, "qwen3_moe": qwen3, "deepseek_v3": deepseek_v3}
VOCAB, LENGTH = 256, 12  # of the configurations made smaller; places of a sample
moe.GroupedExperts._grouped_mm = lambda _, A, B_t, offs: torch.cat(
    [rows @ weight for rows, weight in zip(A.tensor_split(offs[:-1].tolist()), B_t, strict=True)]
)  # takes any dtype
attention.ScaledDotProductAttention.sdpa_backends = [torch.nn.attention.SDPBackend.MATH]


def smaller(config, seen):  # an eighth of every width
    if dataclasses.is_dataclass(config) and id(config) not in seen:
        seen.add(id(config))
        for name, value in ((one.name, getattr(config, one.name)) for one in dataclasses.fields(config)):
            if isinstance(value, int) and value >= 16 and not name.startswith(("n_", "num_experts")):
                setattr(config, name, value // 8)
            elif name == "inner_attention":
                config.inner_attention = attention.ScaledDotProductAttention.Config()  # no kernels of a GPU
            for part in value if isinstance(value, list) else [value]:
                smaller(part, seen)
        if hasattr(config, "gate"):
            config.gate.out_features = config.num_experts


def dense(case, parallelism):  # the whole model, whose weights follow from their names, and its parallelize function
    utils.set_spmd_backend(case.backend)
    words = {"num_mtp_layers": case.heads} if case.heads else {}
    spec = FAMILIES[case.kind].model_registry("debugmodel" + "_moe" * (case.kind == "qwen3_moe"), **words)
    spec.model.layers = spec.model.layers[: case.layers]
    smaller(spec.model, set())
    spec.model.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    model = spec.model.build()
    for name, weight in model.named_parameters():
        draws, dtype = torch.Generator().manual_seed(case.seed + zlib.crc32(name.encode())), getattr(torch, case.dtype)
        weight.data = (torch.randn(weight.shape, generator=draws, dtype=torch.float64) * 0.3).to(dtype)
    return model, spec.parallelize_fn


def train(case, model, dp_ranks, dims=None):
    outcome, optimizer = {}, torch.optim.AdamW(model.parameters(), lr=0.01)
    loss_of = (deepseek_v3.MTPLoss if case.heads else CrossEntropyLoss).Config(global_vocab_size=VOCAB).build()
    context, count = utils.get_spmd_context(parallel_dims=dims), torch.tensor(2 * LENGTH * case.micro * case.dp)
    for step in range(case.steps):
        optimizer.zero_grad()
        outcome[f"loss/{step}"] = total = torch.zeros((), dtype=getattr(torch, case.dtype))
        for micro, dp_rank in ((micro, dp_rank) for micro in range(case.micro) for dp_rank in dp_ranks):
            first = case.samples(step, micro, dp_rank, 2).start  # the number of the first of 2 samples
            tokens = torch.randint(VOCAB, (2, LENGTH + 1), generator=torch.Generator().manual_seed(first))
            inputs, labels, more = tokens[:, :-1], tokens[:, 1:], {"positions": torch.arange(LENGTH).expand(2, -1)}
            if dims and case.backend == "full_dtensor":
                inputs, labels, more = full_dtensor.parallelize_inputs(dims, inputs, labels, more)
            with context():
                loss, _ = loss_of(model(inputs, **more), labels, count, **more)
                loss.backward()
            total += getattr(loss, "to_local", loss.clone)().detach()
        if dims and case.dp > 1:
            torch.distributed.all_reduce(total, group=dims.get_mesh("batch").get_group())
        outcome |= {f"grad/{name}": w.grad.clone() for name, w in model.named_parameters() if step == 0}
        optimizer.step()
    return outcome | {f"param/{name}": weight.detach() for name, weight in model.named_parameters()}


def truth(case, device):
    return train(case, dense(case, ParallelismConfig(spmd_backend=case.backend))[0], range(case.dp))


def subject(case, device):
    degrees = {"tensor_parallel_degree": case.tp, "data_parallel_replicate_degree": min(case.replicas, case.dp)}
    degrees |= {"expert_parallel_degree": case.ep, "enable_sequence_parallel": case.sp}
    parallelism = ParallelismConfig(**degrees, spmd_backend=case.backend)
    (model, parallelize), dims = dense(case, parallelism), ParallelDims.from_config(parallelism, case.world_size)
    training = TrainingConfig(mixed_precision_param=case.dtype, mixed_precision_reduce=case.dtype)
    words = {"compile_config": CompileConfig(enable=False), "ac_config": None, "dump_folder": "", "training": training}
    model = parallelize(model, parallel_dims=dims, parallelism=parallelism, **words)
    if model.enable_weight_tying:  # as its init_states does afterwards
        model.tok_embeddings.weight = model.lm_head.weight
    return train(case, model, [case.axis_rank("dp", torch.distributed.get_rank())], dims)


@contextmanager
def session():  # keeps float64 where torchtitan casts to float32 or bfloat16
    same, float64 = (lambda x: x), mock.patch.dict(TORCH_DTYPE_MAP, float64=torch.float64)
    with mock.patch.multiple(torch.Tensor, float=same, bfloat16=same), float64:
        yield


def refuses(case):
    rounds = case.kind == "qwen3_moe" or (case.kind == "deepseek_v3" and case.layers > 1)
    if case.world_size > case.tp * case.dp or (rounds and case.dtype == "float64"):
        return "rounds what experts return to float32" if rounds else "is parallel over tp, dp and ep"
    return ""


subject.truth, subject.refuses, subject.session, subject.harmless = truth, refuses, session, softmax_shift
subject.words = {"kind": tuple(FAMILIES), "backend": ("spmd_types", "partial_dtensor", "full_dtensor"), "sp": True}
subject.words |= {"replicas": 1, "ep": 1, "etp": 1, "heads": 0, "layers": 2, "micro": 2}
subject.cases = ("tp=2 dp=2", "dp=2 ep=2 kind=deepseek_v3 dtype=float32")
