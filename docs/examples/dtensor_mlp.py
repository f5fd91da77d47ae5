"""A subject of a few lines: the dense model with the MLPs of its layers split over the ranks by torch's DTensor."""

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication

from shardproof import full_parameter, parameter_shapes, train_dense


def subject(case, device):
    """Outcome of training on every rank: full tensors and DTensors by name."""
    mesh = init_device_mesh(device.type, (case.tp,))
    weights = {}
    for name in parameter_shapes(case):
        split = Shard(0) if ".mlp.w1." in name else Shard(1) if name.endswith(".mlp.w2.weight") else Replicate()
        weights[name] = distribute_tensor(full_parameter(case, name, device=device), mesh, [split], src_data_rank=None)
    with implicit_replication():
        return train_dense(case, weights)


subject.modes = ("tp",)
subject.cases = (  # what runs when no case is named
    "mode=tp tp=2 micro=3 layers=1",
    "mode=tp tp=2 micro=3 layers=1 positions=rope norm=rmsnorm optimizer=adamw lr=0.1 clip=0.1 recompute=full",
)
subject.refuses = lambda case: (
    "splits plain MLPs in two"
    if case.world_size != 2 or case.activation == "swiglu"
    else "DTensor raises IndexError in the counts of the metric"
    if case.metric
    else ""
)
