"""The private names of torch on operators, process groups, worlds, meshes and the meta device: each is tried."""

import contextlib
import inspect
import threading
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d
from torch.nn import functional

from shardproof.harness.errors import RequestError
from shardproof.harness.torch_internals.backends import (
    fake_group,
    fake_store,
    flight_record,
    fused_attention,
    meta_device,
    waits_of_fakes,
)
from shardproof.harness.torch_internals.dispatch import (
    BACKEND_SELECT,
    arguments_of,
    full_name,
    has_kernel,
    kernels,
    operator_names,
)
from shardproof.harness.torch_internals.world import (
    _PRIVATE_NAMES,
    _RANKS,
    Tables,
    by_thread,
    kept_apart,
    leave_world,
    rank_tables,
    redirect_function,
)
from tests.harness.shapes.probe import Probe, probe


@probe(
    "operators of collectives known by their schemas",
    names="torch._C._dispatch_get_all_op_names OpOverload._schema _opname _overloadpacket",
    otherwise="no recording on real backends: MachineError",
)
def _has_schemas() -> bool:
    names = operator_names("c10d")
    read = arguments_of(torch.ops.c10d.allgather_.default)
    wanted = [("output_tensors", "tensors"), ("input_tensors", "tensors"), ("process_group", "group")]
    named = full_name(torch.ops.aten.mm.out) == "aten::mm.out" and full_name(torch.ops.aten.mm.default) == "aten::mm"
    return "allreduce_" in names and named and [tuple(argument) for argument in read[:3]] == wanted


@probe(
    "calls of real backends recorded at the dispatcher",
    names="torch.library.Library._destroy torch._C.DispatchKey.BackendSelect OpOverload.redispatch",
    otherwise="no recording on real backends: MachineError",
)
def _can_be_wrapped() -> bool:
    """A kernel at BackendSelect sees a call, passes it on, and is gone afterwards."""
    name, seen = "c10d::allreduce_", []
    if has_kernel(name, "BackendSelect"):
        return True  # the recorder is on, and it proves itself when it is entered
    operator = torch.ops.c10d.allreduce_.default

    def kernel(keys: Any, *arguments: Any) -> Any:
        seen.append(arguments[0][0].numel())
        return operator.redispatch(keys.remove(BACKEND_SELECT), *arguments)

    group, options = fake_group(), dist.AllreduceOptions()
    with kernels("c10d", "BackendSelect") as add:
        add("allreduce_", kernel, with_keyset=True)
        group.allreduce([torch.ones(3)], options).wait()
    group.allreduce([torch.ones(3)], options).wait()
    return seen == [3] and not has_kernel(name, "BackendSelect")


@probe(
    "the dry engine and its timelines",
    names="fake_pg.FakeStore FakeProcessGroup._create_internal ProcessGroup._register_backend FakeWork.wait",
    otherwise="no dry engine, and no recording on real backends: MachineError",
)
def _waits() -> bool:
    seen: list[int] = []
    work = fake_group().allreduce([torch.ones(2)], dist.AllreduceOptions())
    with waits_of_fakes(seen.append):
        work.wait()
    return fake_store() is not None and seen == [id(work)]


@probe(
    "groups that answer torch",
    names="_allgather_base _reduce_scatter_base _start_coalescing _end_coalescing _source_rank _get_backend "
    "_device_types _has_hooks",
    otherwise="flat collectives, batched messages or any-source receives fail in the in-process engine",
)
def _calls_by_private_names() -> bool:
    """Of every method that is answered under two names, torch has one."""
    owners = dist.ProcessGroup, dist.Work
    return all(any(hasattr(owner, name) for owner in owners for name in pair) for pair in _PRIVATE_NAMES.items())


@probe(
    "the Flight Recorder beside a torch trace",
    names="torch._C._distributed_c10d._dump_fr_trace_json",
    otherwise="`--profile torch` has the trace alone",
)
def _is_a_log() -> bool:
    return isinstance(flight_record(), list)


@probe(
    "a world of torch.distributed for every rank thread",
    names="torch.distributed.distributed_c10d._world _World, torch._C._distributed_c10d._set_thread_isolation_mode",
    otherwise="no in-process engine: MachineError",
)
def _has_own_world() -> bool:
    with contextlib.suppress(RequestError), by_thread() as ranks:
        world: Any = c10d._world
        before = world.group_count
        ranks[get_ident()] = mine = Tables()
        world.group_count = 7
        own = world.pg_map is mine.pg_map and mine.group_count == 7 and world.default_pg is None
        leave_world()
        return own and world.group_count == before
    return rank_tables() is not None  # a run is active, so it works


@probe(
    "groups made by an engine",
    names="torch.distributed.distributed_c10d._new_process_group_helper",
    otherwise="neither the in-process engine nor the pool: MachineError",
)
def _names_its_arguments() -> bool:
    names = inspect.signature(c10d._new_process_group_helper).parameters
    return {"backend", "group_name", "global_ranks_in_group", "group_size"} <= set(names)


@probe(
    "init_process_group and split_group redirected where user code imported them earlier",
    names="the closure of torch's logging wrapper",
    otherwise="neither the in-process engine nor the pool: MachineError",
)
def _is_redirected() -> bool:
    calls: list[str] = []
    with redirect_function(dist.init_process_group, lambda _original, *words, **_named: calls.append(str(*words))):
        dist.init_process_group("nothing")
    return calls == ["nothing"]


@probe(
    "meshes of rank threads kept apart",
    names="torch.distributed.device_mesh.get_backend, threading; caches of torch.distributed.tensor",
    otherwise="uneven shards of DTensor in the in-process engine may take another rank's cached plan",
)
def _tells_threads_apart() -> bool:
    module: Any = device_mesh
    with kept_apart(lambda: 3):
        threaded, number = module.get_backend(), module.threading.get_ident()
    return threaded == "threaded" and number % _RANKS == 3 and module.threading is threading


@probe(
    "coalesced collectives, batches of messages and device modules on the meta device",
    names="torch._C.DispatchKeySet, DispatchKey.CPU; kernels of c10d for the CPU; ProcessGroup._get_backend",
    otherwise="a dry run of FSDP2, DTensor, a coalesced collective or a batch of messages is unknown",
)
def _reaches_the_group() -> bool:
    tensors: list[Tensor] = [torch.ones(2, device="meta")]
    with meta_device():
        work = fake_group().allreduce_coalesced(tensors, dist.AllreduceCoalescedOptions())
        device = torch.get_device_module("meta").current_device()
        backend = fake_group()._get_backend(torch.device("meta"))
    return isinstance(work, dist.Work) and device == 0 and backend is not None and not hasattr(torch, "meta")


@probe(
    "attention of dry runs by the fused kernel",
    names="torch.ops.aten._scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_attention_math"
    " _scaled_dot_product_efficient_attention",
    otherwise="attention is decomposed, and its memory overestimated",
)
def _saves_no_scores() -> bool:
    """Backward of 8 queries of 4 numbers keeps q, k, v, out and a row of 8 (or more), and no 8 by 8 scores.

    Values may have as many numbers or fewer.
    """
    q = torch.empty(1, 1, 8, 4, device="meta", requires_grad=True)
    v = torch.empty(1, 1, 8, 2, device="meta", requires_grad=True)
    saved: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    with fused_attention(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        narrow = functional.scaled_dot_product_attention(q, q, v, is_causal=True)
    right = out.shape == q.shape and narrow.shape == v.shape
    return right and bool(saved) and all(shape[-2:] != (8, 8) for shape in saved)


PROBES = tuple(one for one in tuple(globals().values()) if isinstance(one, Probe))
