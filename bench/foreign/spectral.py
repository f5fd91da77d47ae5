"""A Fourier layer with complex weights, data parallel by hand, its features split over tp.

Its truth calls the whole layer in the dtype of the case.
"""

import torch
import torch.distributed as dist

from shardproof import Shard

COMPLEX = {torch.float64: torch.complex128, torch.float32: torch.complex64}


class Spectral(torch.nn.Module):
    def __init__(self, case, first=0, many=None):
        super().__init__()
        many, real = many or case.width, getattr(torch, case.dtype)
        gen = torch.Generator().manual_seed(case.seed % 2**45 + 12)
        w = torch.randn(case.modes, case.width, case.width, 2, generator=gen, dtype=torch.float64) / case.width
        b = torch.randn(case.width, generator=gen, dtype=torch.float64)
        s = torch.randn(case.width, case.width, generator=gen, dtype=torch.float64) / case.width**0.5
        self.weight = torch.nn.Parameter(torch.view_as_complex(w).to(COMPLEX[real])[:, :, first : first + many].clone())
        self.bias = torch.nn.Parameter(b.to(real)[first : first + many].clone())
        self.skip = torch.nn.Parameter(s.to(real)[:, first : first + many].clone())

    def forward(self, x):  # [rows, length, width] -> [rows, length, many]
        low = torch.fft.rfft(x, dim=1, norm="ortho")[:, : self.weight.shape[0]]
        mixed = torch.einsum("rmi,mio->rmo", low, self.weight)
        return torch.fft.irfft(mixed, n=x.shape[1], dim=1, norm="ortho") + x @ self.skip + self.bias


def rows(case, step, micro, rank):
    ns = case.samples(step, micro, rank, case.rows)
    gens = (torch.Generator().manual_seed(case.seed % 2**45 + 1000 + n) for n in ns)
    return torch.stack([torch.randn(case.length, case.width, generator=gen, dtype=torch.float64) for gen in gens])


def train(case, layer, ranks, first=0, sync=lambda t: t):
    out, dtype, many = {}, layer.bias.dtype, len(layer.bias)
    opt = torch.optim.Adam(layer.parameters(), lr=0.01)
    for step in range(case.steps):
        total = torch.zeros((), dtype=dtype)
        for micro in range(case.micro):
            for rank in ranks:
                x = rows(case, step, micro, rank).to(dtype)
                y = layer(x) - x.roll(1, 1)[..., first : first + many]
                loss = (y.abs() + 0.1 * y.square()).sum() / (
                    case.rows * case.length * case.width * case.micro * case.dp
                )
                loss.backward()
                total += loss.detach()
        out[f"loss/{step}"] = sync(total, True)
        for name, p in layer.named_parameters():
            sync(p.grad)
            if step == 0:
                out[f"grad/{name}"] = p.grad.clone()
        opt.step()
        opt.zero_grad()
    return out | {f"param/{name}": p.detach() for name, p in layer.named_parameters()}


def subject(case, device):
    mesh = dist.init_device_mesh("cpu", (case.dp, case.tp), mesh_dim_names=("dp", "tp"))
    many = case.width // case.tp
    first = mesh.get_local_rank("tp") * many

    def sync(t, everywhere=False):
        real = torch.view_as_real(t) if t.is_complex() else t
        dist.all_reduce(real, group=None if everywhere else mesh.get_group("dp"))
        return t

    out = train(case, Spectral(case, first, many), [mesh.get_local_rank("dp")], first, sync)

    def full(t):
        shape = (*t.shape[:-1], case.width)
        return Shard(t, (*(0,) * (t.dim() - 1), first), shape)

    return {n: full(t) if t.dim() else t for n, t in out.items()}


subject.truth = lambda case, device: train(case, Spectral(case), range(case.dp), sync=lambda t, _=None: t)
subject.words = {"width": (12, 6), "length": (11, 8), "modes": (4, 3), "rows": (3, 2)}
subject.cases = ("tp=2 dp=2", "tp=3", "dp=3", "tp=3 dp=2")
subject.dtypes = ("float64", "float32")
subject.refuses = lambda case: "" if case.dtype in subject.dtypes else "there are no complex numbers of this dtype"
