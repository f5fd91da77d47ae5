"""What `torchtitan_recipe` needs around torchtitan's Trainer on a CPU: samples, first weights, stand-ins for a GPU."""

import os
import zlib
from contextlib import contextmanager
from unittest import mock

import torch
from torch.distributed.tensor import distribute_tensor

from shardproof.suites.subjects import torchtitan

LENGTH, IGNORED = 16, -100  # tokens of a row; the label of a prompt


def draw_batch(numbers):  # the samples of these numbers; each begins with a prompt, whose labels do not count
    draws = [torch.Generator().manual_seed(number) for number in numbers]
    tokens = torch.stack([torch.randint(torchtitan.VOCAB, (LENGTH + 1,), generator=one) for one in draws])
    prompts = torch.tensor([[number % 7] for number in numbers])
    labels = torch.where(torch.arange(LENGTH) < prompts, IGNORED, tokens[:, 1:])
    return {"input": tokens[:, :-1], "positions": torch.arange(LENGTH).expand(len(numbers), -1)}, labels


def named(model):  # the parameters, without the names that wrappers of recomputation add
    return [(name.replace("_checkpoint_wrapped_module.", ""), weight) for name, weight in model.named_parameters()]


def start(case, model):  # from weights that follow from their names
    for name, weight in named(model):
        draws = torch.Generator().manual_seed(case.seed + zlib.crc32(name.encode()))
        whole = torch.randn(weight.shape, generator=draws, dtype=torch.float64).mul_(0.3).to(getattr(torch, case.dtype))
        if hasattr(weight, "placements"):
            part = distribute_tensor(whole, weight.device_mesh, weight.placements, src_data_rank=None)
            weight.detach().copy_(part)
        else:
            weight.data = whole


@contextmanager
def session():  # no GPU's memory is read, `start` draws weights, and garbage is collected as before
    most = mock.Mock(max_reserved_gib=0.0, max_reserved_pct=0.0)
    monitor = mock.Mock(device_name="", **{"get_peak_stats.return_value": most})
    monitors = mock.patch("torchtitan.components.metrics.build_device_memory_monitor", lambda: monitor)
    drawn = mock.patch("torchtitan.protocols.module.Module._init_param", lambda *given: None)
    with torchtitan.session(), monitors, drawn, mock.patch("gc.disable"), mock.patch.dict(os.environ, LOCAL_RANK="0"):
        yield
