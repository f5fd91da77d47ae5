"""Documents packed into rows: attention stays inside of a document, and the mean is over all tokens but paddings.

The sequence is split over cp by gathering keys and values. Data ranks have unequal numbers of tokens that count.
"""

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, layer_norm, scaled_dot_product_attention


def pack_rows(case, step, micro, rank):
    """Tokens, labels (-1: none), documents (0: padding), positions, each [rows, length]."""
    rows = []
    for number in case.samples(step, micro, rank, case.rows):
        rng = torch.Generator().manual_seed(number * 11 + case.seed % 10**12)
        sizes = torch.randint(2, 6, (case.length,), generator=rng)
        sizes = sizes[: int((sizes.cumsum(0) <= case.length - number % 3).sum())]
        document = torch.arange(1, len(sizes) + 1).repeat_interleave(sizes)
        document = torch.cat([document, document.new_zeros(case.length - len(document))])
        position = torch.cat([torch.arange(int(size)) for size in sizes])
        position = torch.cat([position, position.new_zeros(case.length - len(position))])
        token = torch.randint(1, case.vocab, (case.length,), generator=rng) * (document > 0)
        same = torch.cat([document[1:] == document[:-1], torch.tensor([False])]) & (document > 0)
        rows.append(torch.stack([token, torch.where(same, token.roll(-1), -1), document, position]))
    return torch.stack(rows, 1)


def fresh(case):
    sizes = {
        "token": (case.vocab, case.width),
        "place": (6, case.width),
        "norm": (case.width,),
        "qkv": (case.width, 3 * case.width),
    }
    sizes |= {"out": (case.width, case.width), "head_bias": (case.vocab,)}
    for number, (name, size) in enumerate(sizes.items()):
        rng = torch.Generator().manual_seed(case.seed % 10**12 * 10 + number)
        value = torch.randn(*size, generator=rng, dtype=torch.float64) * 0.35 + (name == "norm")
        yield name, value.to(getattr(torch, case.dtype))


class GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):  # [rows, mine, ..] -> [rows, all, ..]
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        parts = [part.contiguous() for part in grad.chunk(dist.get_world_size(ctx.group), 1)]
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter(mine, parts, group=ctx.group)
        return mine, None


def logits(p, tokens, positions, documents, here, heads, gather):
    x = p["token"][tokens[:, here]] + p["place"][positions[:, here]]
    qkv = layer_norm(x, x.shape[-1:], p["norm"]) @ p["qkv"]
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).unbind(2)
    k, v = gather(torch.stack([k, v], -1)).unbind(-1)
    order = torch.arange(tokens.shape[1])
    allowed = (documents[:, here, None] == documents[:, None]) & (order[here, None] >= order)
    y = scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), attn_mask=allowed[:, None])
    return (x + y.transpose(1, 2).flatten(2) @ p["out"]) @ p["token"].T + p["head_bias"]


def steps(case, ranks, here, gather, add):
    p, out = {name: torch.nn.Parameter(value) for name, value in fresh(case)}, {}
    optimizer = torch.optim.AdamW(p.values(), lr=0.005, amsgrad=True)
    for step in range(case.steps):
        batches = [pack_rows(case, step, micro, rank) for micro in range(case.micro) for rank in ranks]
        count = add(sum((labels[:, here] >= 0).sum() for _, labels, _, _ in batches))
        total = torch.zeros((), dtype=p["norm"].dtype)
        for tokens, labels, documents, positions in batches:
            z = logits(p, tokens, positions, documents, here, case.heads, gather)
            loss = cross_entropy(z.flatten(0, 1), labels[:, here].flatten(), ignore_index=-1, reduction="sum") / count
            loss.backward()
            total += loss.detach()
        out[f"loss/{step}"], out[f"tokens/{step}"] = add(total), count
        for name, weight in p.items():
            add(weight.grad)
            if step == 0:
                out[f"grad/{name}"] = weight.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    return out | {f"param/{name}": weight.detach() for name, weight in p.items()}


def subject(case, device):
    mesh = dist.init_device_mesh("cpu", (case.dp, case.cp), mesh_dim_names=("dp", "cp"))
    size = case.length // case.cp
    first = mesh.get_local_rank("cp") * size

    def add(tensor):
        dist.all_reduce(tensor)
        return tensor

    def gather(x):
        return GatherTokens.apply(x, mesh.get_group("cp"))

    return steps(case, [mesh.get_local_rank("dp")], slice(first, first + size), gather, add)


subject.truth = lambda case, device: steps(case, range(case.dp), slice(None), lambda x: x, lambda tensor: tensor)
subject.words = {"vocab": (19, 13, 211), "width": (12, 6, 42), "heads": (3, 2), "length": (12, 24), "rows": (2, 3)}
subject.cases = ("cp=2 dp=2", "cp=3", "dp=3", "cp=4", "cp=3 dp=2")
