"""FSDP by hand: all parameters of a block in one flat, padded tensor, gathered for forward, dropped, gathered again.

Each rank steps float32 masters of its share (those of a float64 case are float64), and returns masters and moments.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

LR, DECAY = 0.02, 0.05


def wide(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def layout(case):
    w, i = case.width, case.inner
    block = {"gain": (w,), "up": (i, w), "up_bias": (i,), "down": (w, i), "down_bias": (w,)}
    return [{f"{number}.{name}": shape for name, shape in block.items()} for number in range(case.blocks)]


def initial(case, block):
    rng = torch.Generator().manual_seed(case.seed % 2**31 * 7 + len(block) + int(next(iter(block)).split(".")[0]))
    made = {n: torch.randn(s, generator=rng, dtype=torch.float64) * s[-1] ** -0.5 for n, s in block.items()}
    return {n: (t + 1 if "gain" in n else t) for n, t in made.items()}


def forward(params, x):
    gain, up, up_bias, down, down_bias = params.values()
    return x + F.linear(F.softplus(F.linear(F.rms_norm(x, gain.shape, gain, 1e-6), up, up_bias)), down, down_bias)


def samples(case, step, micro, rank, dtype):
    pairs = []
    for n in case.samples(step, micro, rank, case.rows):
        rng = torch.Generator().manual_seed(n * 3 + case.seed % 2**31)
        pairs.append(torch.randn(2, case.width, generator=rng, dtype=torch.float64))
    return torch.stack(pairs, 1).to(dtype)


def cut_block(block, flat):
    parts, at = {}, 0
    for name, shape in block.items():
        size = torch.Size(shape).numel()
        parts[name], at = flat[at : at + size].view(shape), at + size
    return parts


class Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, share, dtype):
        ctx.wide = share.dtype
        whole = torch.empty(share.numel() * dist.get_world_size(), dtype=dtype)
        dist.all_gather_into_tensor(whole, share.to(dtype))
        return whole

    @staticmethod
    def backward(ctx, grad):
        mine = torch.empty(grad.numel() // dist.get_world_size(), dtype=ctx.wide)
        dist.reduce_scatter_tensor(mine, grad.to(ctx.wide))
        return mine, None


def whole(block, share):
    out = share.new_empty(share.numel() * dist.get_world_size())
    dist.all_gather_into_tensor(out, share.contiguous())
    return {name: part.clone() for name, part in cut_block(block, out).items()}


def subject(case, device):
    dtype, rank, ranks = getattr(torch, case.dtype), dist.get_rank(), case.dp
    blocks, shares, out = layout(case), [], {}
    for block in blocks:
        flat = torch.cat([t.to(dtype).flatten() for t in initial(case, block).values()]).to(wide(dtype))
        flat = F.pad(flat, (0, -flat.numel() % ranks))
        shares.append(torch.nn.Parameter(flat.chunk(ranks)[rank].clone()))
    adam = torch.optim.AdamW(shares, lr=LR, weight_decay=DECAY)

    def once(share, block, x):
        return forward(cut_block(block, Unshard.apply(share, dtype)), x)

    for step in range(case.steps):
        total = torch.zeros((), dtype=dtype)
        for micro in range(case.micro):
            x, y = samples(case, step, micro, rank, dtype)
            for share, block in zip(shares, blocks, strict=True):
                x = torch.utils.checkpoint.checkpoint(once, share, block, x, use_reentrant=False)
            loss = (x - y).abs().pow(1.5).mean() / (case.micro * ranks)
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        out[f"loss/{step}"] = total
        for share, block in zip(shares, blocks, strict=True):
            out |= {f"grad/{n}": t for n, t in whole(block, share.grad).items() if step == 0}
        adam.step()
        for share, block in zip(shares, blocks, strict=True):
            kept = {"param": share.detach()} | {k: adam.state[share][k] for k in ("exp_avg", "exp_avg_sq")}
            for kind, t in kept.items():
                out |= {f"{kind}_after/{step}/{n}": part for n, part in whole(block, t).items()}
        adam.zero_grad()
    for share, block in zip(shares, blocks, strict=True):
        out |= {f"param/{n}": part for n, part in whole(block, share.detach()).items()}
    return out


def truth(case, device):
    dtype, out = getattr(torch, case.dtype), {}
    masters = {n: t.to(dtype).to(wide(dtype)) for block in layout(case) for n, t in initial(case, block).items()}
    masters = {n: torch.nn.Parameter(t) for n, t in masters.items()}
    adam = torch.optim.AdamW(masters.values(), lr=LR, weight_decay=DECAY)
    for step in range(case.steps):
        total = torch.zeros((), dtype=dtype)
        for micro in range(case.micro):
            for rank in range(case.dp):
                x, y = samples(case, step, micro, rank, dtype)
                for block in layout(case):
                    x = forward({n: masters[n].to(dtype) for n in block}, x)
                loss = (x - y).abs().pow(1.5).mean() / (case.micro * case.dp)
                loss.backward()
                total += loss.detach()
        out[f"loss/{step}"] = total
        out |= {f"grad/{n}": p.grad.clone() for n, p in masters.items() if step == 0}
        adam.step()
        adam.zero_grad()
        for n, p in masters.items():
            out[f"param_after/{step}/{n}"] = p.detach().clone()
            out |= {f"{k}_after/{step}/{n}": adam.state[p][k].clone() for k in ("exp_avg", "exp_avg_sq")}
    return out | {f"param/{n}": p.detach() for n, p in masters.items()}


subject.truth, subject.cases = truth, ("dp=3", "dp=2", "dp=4")
subject.words = {"width": (7, 5, 39), "inner": (11, 6, 70), "rows": (3, 2), "blocks": (2, 1, 5)}
subject.refuses = lambda case: "dp alone" if case.world_size > case.dp else ""
