"""A head over a vocabulary that is split unevenly over tp, and its cross-entropy without gathering a logit.

Labels of -100 do not count, and data ranks have different numbers of labels that do.
"""

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from shardproof import Shard, softmax_shift

IGNORED = -100


def f64(seed, *size):
    return torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed & (2**63 - 1)))


def model(case):
    t = getattr(torch, case.dtype)
    emb = f64(case.seed * 3 + 1, case.vocab, case.width).mul(0.7).to(t)
    bias = f64(case.seed * 3 + 2, case.vocab).mul(0.3).to(t)
    body = f64(case.seed * 3 + 3, case.width, case.width).div(case.width**0.5).to(t)
    return emb, bias, body


def text(case, step, micro, dp):
    x, y = [], []
    for n in case.samples(step, micro, dp, case.rows):
        g = torch.Generator().manual_seed(n + (case.seed & 0xFFFFFF) * 1000)
        row = torch.randint(case.vocab, (case.length + 1,), generator=g)
        label = row[1:].clone()
        label[: n % case.length] = IGNORED  # like a prompt
        x.append(row[:-1])
        y.append(label)
    return torch.stack(x), torch.stack(y)


def count_tokens(case, step):
    sets = [text(case, step, m, d)[1] for m in range(case.micro) for d in range(case.dp)]
    return sum(int((y != IGNORED).sum()) for y in sets)


class VocabularyLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, first, group):
        top = logits.amax(-1)
        dist.all_reduce(top, ReduceOp.MAX, group=group)
        shifted = logits - top[..., None]
        exps = shifted.exp()
        norm = exps.sum(-1)
        dist.all_reduce(norm, group=group)
        here = (labels >= first) & (labels < first + logits.shape[-1])
        place = (labels - first).clamp(0, logits.shape[-1] - 1)
        own = shifted.gather(-1, place[..., None])[..., 0] * here
        dist.all_reduce(own, group=group)
        seen = labels != IGNORED
        ctx.save_for_backward(exps / norm[..., None], place, here, seen)
        return (norm.log() - own) * seen

    @staticmethod
    def backward(ctx, grad):
        probs, place, here, seen = ctx.saved_tensors
        d = probs.clone()
        d.scatter_add_(-1, place[..., None], -here[..., None].to(d.dtype))
        return d * (grad * seen)[..., None], None, None, None


class Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def subject(case, device):
    me = dist.get_rank()
    i, d = case.axis_rank("tp", me), case.axis_rank("dp", me)
    tp = [dist.new_group(list(ranks), group_desc="tp") for ranks in case.axes["tp"]][d]
    dp = [dist.new_group(list(ranks), group_desc="dp") for ranks in case.axes["dp"]][i]
    edges = [round(case.vocab * k / case.tp) for k in range(case.tp + 1)]
    lo, hi = edges[i], edges[i + 1]
    emb, bias, body = model(case)
    emb, bias = emb[lo:hi].clone().requires_grad_(), bias[lo:hi].clone().requires_grad_()
    body = body.requires_grad_()
    opt = torch.optim.Adamax([emb, bias, body], lr=0.02)
    out = {}

    def put(kind, a, b, c):
        out[f"{kind}/emb"] = Shard(a.detach().clone(), (lo, 0), (case.vocab, case.width))
        out[f"{kind}/bias"] = Shard(b.detach().clone(), (lo,), (case.vocab,))
        out[f"{kind}/body"] = c.detach().clone()

    for step in range(case.steps):
        n, total = count_tokens(case, step), torch.zeros((), dtype=emb.dtype)
        for micro in range(case.micro):
            x, y = text(case, step, micro, d)
            mine = (x >= lo) & (x < hi)
            h = torch.nn.functional.embedding((x - lo).clamp(0, hi - lo - 1), emb) * mine[..., None]
            dist.all_reduce(h.data, group=tp)
            h = torch.tanh(h @ body)
            losses = VocabularyLoss.apply(Copied.apply(h, tp) @ emb.t() + bias, y, lo, tp)
            loss = losses.sum() / n
            loss.backward()
            total += loss.detach()
        for t in (emb.grad, bias.grad, body.grad, total):
            dist.all_reduce(t, group=dp)
        out[f"loss/{step}"], out[f"tokens/{step}"] = total, torch.tensor(n)
        if step == 0:
            put("grad", emb.grad, bias.grad, body.grad)
        opt.step()
        opt.zero_grad()
    put("param", emb, bias, body)
    return out


def truth(case, device):
    params = [t.double().requires_grad_() for t in model(case)]
    emb, bias, body = params
    opt, out = torch.optim.Adamax(params, lr=0.02), {}
    for step in range(case.steps):
        n = count_tokens(case, step)
        xs, ys = zip(*(text(case, step, m, d) for m in range(case.micro) for d in range(case.dp)), strict=True)
        h = torch.tanh(emb[torch.cat(xs)] @ body)
        logits = h @ emb.t() + bias
        labels = torch.cat(ys).flatten()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum") / n
        opt.zero_grad()
        loss.backward()
        out |= {f"loss/{step}": loss.detach(), f"tokens/{step}": torch.tensor(n)}
        if step == 0:
            out |= {f"grad/{k}": p.grad.clone() for k, p in zip(("emb", "bias", "body"), params, strict=True)}
        opt.step()
    return out | {f"param/{k}": p.detach() for k, p in zip(("emb", "bias", "body"), params, strict=True)}


subject.truth = truth
subject.words = {"vocab": (31, 23, 509), "width": (6, 9, 34), "length": (7, 5, 29), "rows": (3, 2)}
subject.cases = ("tp=2 dp=2", "tp=3", "tp=4 dp=2", "tp=5")
subject.harmless = softmax_shift
