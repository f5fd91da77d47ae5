"""Where the parameters of Megatron-Core's models lie: names of experts over all ranks, parts over tp and etp."""

import warnings

from shardproof import Shard

with warnings.catch_warnings(action="ignore"):  # Megatron's own, at import
    from megatron.core import parallel_state


def layout(name, weight):  # the dim along which it is split, over how many ranks, and the place of this one
    if not getattr(weight, "tensor_model_parallel", False):
        return 0, 1, 0
    kind = "expert_tensor_parallel" if "local_experts" in name else "tensor_model_parallel"
    size, place = (getattr(parallel_state, f"get_{kind}_{what}")() for what in ("world_size", "rank"))
    return weight.partition_dim, size, place


def parts(model, name, weight, tensor):  # of a rank's tensor, with the place of each part in the full one
    dim, tp, place = layout(name, weight)
    gated = 2 if model.config.gated_linear_unit and "fc1" in name else 1  # gate and up are one tensor, both split
    shape = [size * tp if at == dim else size for at, size in enumerate(tensor.shape)]
    for number, part in enumerate(tensor.chunk(gated, dim)):
        offsets = [0] * part.dim()
        offsets[dim] = (number * tp + place) * part.shape[dim]
        yield Shard(part, tuple(offsets), tuple(shape))


def weights(model):  # an expert by its number among all experts, where Megatron counts those of a rank
    for name, weight in model.named_parameters():
        before, experts, after = name.partition("local_experts.")
        if not experts:
            yield name, weight
            continue
        local, _, rest = after.partition(".")
        first = parallel_state.get_expert_model_parallel_rank() * model.config.num_moe_experts
        number = first // parallel_state.get_expert_model_parallel_world_size() + int(local)
        yield f"{before}{experts}{number}.{rest}", weight
