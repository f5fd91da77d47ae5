"""Wrong arguments, the same on every rank: torch's Python or a backend's C++ refuses them before anything is sent."""

from tests.harness.threads.torch_calls.listed import CALLS, Call, dist, filled, own

MISTAKES: dict[str, Call] = {
    "all_reduce of a list": lambda r, n: dist.all_reduce([own(r, 2)]),
    "all_reduce of a number": lambda r, n: dist.all_reduce(1.0),
    "all_reduce with a word for its op": lambda r, n: dist.all_reduce(own(r, 2), "sum"),
    "all_reduce of a sparse tensor in another layout": lambda r, n: dist.all_reduce(own(r, 2, 2).to_sparse_csr()),
    "broadcast from a rank that does not exist": lambda r, n: dist.broadcast(own(r, 2), n),
    "broadcast from a negative rank": lambda r, n: dist.broadcast(own(r, 2), -1),
    "broadcast without a source": lambda r, n: dist.broadcast(own(r, 2)),
    "broadcast with both sources": lambda r, n: dist.broadcast(own(r, 2), src=0, group_src=0),
    "broadcast from a float": lambda r, n: dist.broadcast(own(r, 2), 1.0),
    "reduce to a rank that does not exist": lambda r, n: dist.reduce(own(r, 2), n),
    "all_gather into too few": lambda r, n: dist.all_gather([filled(2) for _ in range(n - 1)], own(r, 2)),
    "all_gather into too many": lambda r, n: dist.all_gather([filled(2) for _ in range(n + 1)], own(r, 2)),
    "all_gather into nothing": lambda r, n: dist.all_gather([], own(r, 2)),
    "all_gather into another dtype": lambda r, n: dist.all_gather([filled(2).float() for _ in range(n)], own(r, 2)),
    "all_gather into another size": lambda r, n: dist.all_gather([filled(3) for _ in range(n)], own(r, 2)),
    "all_gather_into_tensor of another size": lambda r, n: dist.all_gather_into_tensor(filled(2 * n + 1), own(r, 2)),
    "all_gather_into_tensor of another dtype": lambda r, n: dist.all_gather_into_tensor(
        filled(2 * n).float(), own(r, 2)
    ),
    "reduce_scatter from too few": lambda r, n: dist.reduce_scatter(filled(2), [own(r, 2) for _ in range(n - 1)]),
    "reduce_scatter of another dtype": lambda r, n: dist.reduce_scatter(
        filled(2).float(), [own(r, 2) for _ in range(n)]
    ),
    "reduce_scatter_tensor of another size": lambda r, n: dist.reduce_scatter_tensor(filled(2), own(r, 2 * n + 1)),
    "reduce_scatter_tensor of another dtype": lambda r, n: dist.reduce_scatter_tensor(filled(2).float(), own(r, 2 * n)),
    "all_to_all_single of another dtype": lambda r, n: dist.all_to_all_single(filled(n).float(), own(r, n)),
    "all_to_all_single with too few splits": lambda r, n: dist.all_to_all_single(
        filled(n), own(r, n), [1] * (n - 1), [1] * (n - 1)
    ),
    "all_to_all_single with other sums": lambda r, n: dist.all_to_all_single(filled(n), own(r, n), [2] * n, [2] * n),
    "all_to_all of too few": lambda r, n: dist.all_to_all([filled(2)] * (n - 1), [own(r, 2)] * (n - 1)),
    "all_to_all of two dtypes": lambda r, n: dist.all_to_all([filled(2).float() for _ in range(n)], [own(r, 2)] * n),
    "gather without a list": lambda r, n: dist.gather(own(r, 2), None, r),
    "gather with a list elsewhere": lambda r, n: dist.gather(own(r, 2), [filled(2)] * n, (r + 1) % n),
    "scatter without a list": lambda r, n: dist.scatter(filled(2), None, r),
    "scatter with a list elsewhere": lambda r, n: dist.scatter(filled(2), [own(r, 2)] * n, (r + 1) % n),
    "send to itself": lambda r, n: dist.send(own(r, 2), r),
    "send to a rank that does not exist": lambda r, n: dist.send(own(r, 2), n + 3),
    "receive without a tensor": lambda r, n: dist.recv([filled(2)], 0),
    "batch of nothing": lambda r, n: dist.batch_isend_irecv([]),
    "batch of what is no message": lambda r, n: dist.P2POp(dist.broadcast, own(r, 2), 0),
    "group of a rank that does not exist": lambda r, n: dist.new_group([0, n]),
    "group of one rank twice": lambda r, n: dist.new_group([0, 0]),
    "group of more ranks than there are": lambda r, n: dist.new_group(list(range(n + 1))),
    "group of another backend": lambda r, n: dist.new_group([0, 1], backend="nothing"),
    "subgroups that do not divide": lambda r, n: dist.new_subgroups(3),
    "subgroups that overlap": lambda r, n: dist.new_subgroups_by_enumeration([[0, 1], [1, 2]]),
    "timeout that is none": lambda r, n: dist.new_group([0, 1], timeout=5),
    "world made twice": lambda r, n: [dist.init_process_group("gloo"), dist.init_process_group("gloo")],
    "rank of a group that is none": lambda r, n: dist.get_group_rank(dist.group.WORLD, n + 1),
    "scatter_object_list without lists": lambda r, n: dist.scatter_object_list([], None, 0),
    "all_gather_object into too few": lambda r, n: dist.all_gather_object([None] * (n - 1), r),
    "coalescing of two kinds": lambda r, n: _two_kinds(r),
}
CALLS.update({f"mistake: {name}": make for name, make in MISTAKES.items()})


def _two_kinds(rank: int) -> None:
    with dist.distributed_c10d._coalescing_manager():
        dist.all_reduce(own(rank, 2))
        dist.all_gather_single(filled(8), own(rank, 2))
