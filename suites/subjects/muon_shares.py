"""Three ways to make matrices orthogonal whose parts lie on the ranks of tp: each takes parts and leaves parts."""

import torch
import torch.distributed as dist

from shardproof import Term

SPLIT = {"qkv": 0, "out": 1, "up": 0, "down": 1}  # the dim over which ranks of tp share a matrix


def make_orthogonal(matrix):  # brings its singular values near 1
    x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


def gather_matrices(parts, tp):
    for name, part in parts.items():
        dist.all_gather(found := [torch.empty_like(part) for _ in range(tp.size())], part.contiguous(), group=tp)
        whole = make_orthogonal(torch.cat(found, SPLIT[name]))
        parts[name] = whole.chunk(tp.size(), SPLIT[name])[tp.rank()]


def send_from_owners(parts, tp):
    for number, (name, part) in enumerate(parts.items()):
        owner = number % tp.size()
        found = [torch.empty_like(part) for _ in range(tp.size())] if tp.rank() == owner else None
        dist.gather(part.contiguous(), found, group=tp, group_dst=owner)
        whole = part.repeat_interleave(tp.size(), SPLIT[name])  # the owner's result is written into it
        whole = make_orthogonal(torch.cat(found, SPLIT[name])) if found else whole
        dist.broadcast(whole := whole.contiguous(), group=tp, group_src=owner)
        parts[name] = whole.chunk(tp.size(), SPLIT[name])[tp.rank()]


def pack_parts(parts, names):
    return torch.cat([next(iter(parts.values())).new_empty(0), *(parts[name].flatten() for name in names)])


def unpack_parts(flat, names, like):
    pieces = flat.split([like[name].numel() for name in names]) if names else ()
    return {name: piece.view(like[name].shape) for name, piece in zip(names, pieces, strict=True)}


def exchange_parts(parts, tp):  # every rank orthogonalises the matrices that it owns
    names = [list(parts)[owner :: tp.size()] for owner in range(tp.size())]
    there, own = [pack_parts(parts, each) for each in names], names[tp.rank()]
    dist.all_to_all(here := [torch.empty_like(there[tp.rank()]) for _ in range(tp.size())], there, group=tp)
    found = [unpack_parts(flat, own, parts) for flat in here]
    whole = {name: make_orthogonal(torch.cat([each[name] for each in found], SPLIT[name])) for name in own}
    back = [{name: whole[name].chunk(tp.size(), SPLIT[name])[other] for name in own} for other in range(tp.size())]
    dist.all_to_all(there, [pack_parts(each or parts, own) for each in back], group=tp)
    for flat, each in zip(there, names, strict=True):
        parts |= unpack_parts(flat, each, parts)


SHARES = {"gather": gather_matrices, "owner": send_from_owners, "alltoall": exchange_parts}


def terms_of(case, sizes):  # the calls of one step, for whole matrices of these sizes in bytes
    how, parts = {"phase": "step", "axis": "tp"}, sum(sizes.values()) // case.tp
    if case.update == "alltoall":  # parts of all matrices are sent, and parts of the own ones come back
        owned = [sum(list(sizes.values())[rank :: case.tp]) for rank in range(case.tp)]
        sent = [case.steps * (parts + size) for size in owned]
        calls = {"op": "all_to_all", "calls": 2 * case.steps, **how}
        return [Term(total_bytes=total, at={"tp": rank}, **calls) for rank, total in enumerate(sent)]
    ops = {"gather": {"all_gather": 1}, "owner": {"gather": case.tp, "broadcast": 1}}[case.update]
    counted = [(op, size // share) for op, share in ops.items() for size in sizes.values()]
    return [Term(op=op, calls=case.steps, payload_bytes=payload, **how) for op, payload in counted]
