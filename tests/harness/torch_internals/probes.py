"""The private names of torch, each tried: what a feature needs, and what holds where it does not work."""

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.nn import functional
from torch.utils import checkpoint

from shardproof.harness.errors import RequestError
from shardproof.harness.torch_internals.autograd import (
    called_by,
    current_node,
    current_task,
    function_context,
    has_hooks,
    next_number,
    number_of,
    storage_id,
    version_of,
    when_backward_ends,
    without_version,
)
from shardproof.harness.torch_internals.backends import (
    fake_group,
    fake_store,
    flight_record,
    fused_attention,
    meta_device,
    waits_of_fakes,
)
from shardproof.harness.torch_internals.compiler import _COMPILER, _never_compiled, leave_unloaded
from shardproof.harness.torch_internals.dispatch import (
    BACKEND_SELECT,
    DispatchMode,
    arguments_of,
    c10d_operators,
    copy_each,
    full_name,
    has_kernel,
    hide_from_modes,
    kernels,
    modes_are_on,
    thread_switches,
)
from shardproof.harness.torch_internals.sharding import Decisions
from shardproof.harness.torch_internals.world import (
    _PRIVATE_NAMES,
    _RANKS,
    Tables,
    by_thread,
    kept_apart,
    leave_world,
    own_groups,
    rank_tables,
    redirect_function,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A feature that needs torch: `works()` tries it; `otherwise` is what holds where it does not work."""

    feature: str
    names: str
    otherwise: str
    works: Callable[[], bool]


def probe(feature: str, *, names: str, otherwise: str) -> Callable[[Callable[[], bool]], Probe]:
    """A decorator: the function is the trial of a probe, which takes its place."""
    return lambda works: Probe(feature=feature, names=names, otherwise=otherwise, works=works)


@probe(
    "phases and modules of recorded calls",
    names="torch._C._current_graph_task_id _current_autograd_node _autograd._get_sequence_nr Node._sequence_nr",
    otherwise="nothing can be recorded: MachineError",
)
def _numbers_backward() -> bool:
    """A backward has a task, a node and numbers, and there are none outside it."""
    seen: list[tuple[int, int, bool]] = []
    leaf = torch.ones(2, requires_grad=True)
    first = leaf * 2
    numbers = number_of(first.grad_fn), next_number()
    first.register_hook(lambda _gradient: seen.append((current_task(), 0, current_node() is not None)))
    ends: list[int] = []
    first.register_hook(lambda _gradient: when_backward_ends(lambda: ends.append(1)))
    first.sum().backward()
    outside = current_task() == -1 and current_node() is None
    return numbers[0] + 1 == numbers[1] and outside and len(seen) == 1 and seen[0][0] >= 0 and ends == [1]


class _Twice(Function):
    """A Function that checks whether its forward is recognised from its frames."""

    seen: bool = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        frame: FrameType | None = sys._getframe()
        inner: FrameType | None = None
        while frame is not None and not _Twice.seen:
            inside, context = function_context(frame, inner)
            _Twice.seen = inside and context is ctx
            frame, inner = frame.f_back, frame
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


@probe(
    "metrics distinguished from the forward of an autograd Function",
    names="Function.apply.__func__, or FunctionCtx in the frame of a Function's forward",
    otherwise="a loss in a module without parameters may be recorded as a metric",
)
def _knows_forward() -> bool:
    _Twice.seen = False
    _Twice.apply(torch.ones(2, requires_grad=True))
    return _Twice.seen


@probe("modules watched from outside", names="torch.nn.Module._call_impl", otherwise="calls have no module")
def _is_called() -> bool:
    calls: list[int] = []
    with called_by(lambda original: lambda module, *given: calls.append(1) or original(module, *given)):  # type: ignore[func-returns-value]
        nn.Identity()(torch.ones(1))
    return calls == [1]


@probe(
    "missing sums located in the module that leaves them out",
    names="torch.nn.Module._forward_hooks _forward_pre_hooks",
    otherwise="the place may be a torch.nn module in place of the one around it",
)
def _sees_hooks() -> bool:
    bare, hooked = nn.Identity(), nn.Identity()
    hooked.register_forward_hook(lambda *_: None)
    return has_hooks(hooked) and not has_hooks(bare)


@probe(
    "faults that autograd does not notice",
    names="torch.autograd._unsafe_preserve_version_counter",
    otherwise="autograd may refuse a tensor that a fault has overwritten",
)
def _counts_no_change() -> bool:
    tensor = torch.ones(1)
    before = version_of(tensor)
    with without_version((tensor,)):
        tensor.add_(1)
    return version_of(tensor) == before


@probe(
    "steps of programs that update parameters by hand on a GPU",
    names="torch.Tensor._version",
    otherwise="they count as micro-batches of step 0",
)
def _counts_changes() -> bool:
    tensor = torch.ones(1)
    before = version_of(tensor)
    tensor.add_(1)
    return version_of(tensor) > before


@probe(
    "optimizers and checkpoints without torch's compiler",
    names="Optimizer.zero_grad and checkpoint, their __wrapped__.__dynamo_disable; SGD.step.__wrapped__; _dynamo",
    otherwise="the first optimizer or checkpoint of a process takes a second longer",
)
def _stays_unloaded() -> bool:
    if _COMPILER in sys.modules:  # then it is too late for a trial: only the names are looked at
        return all(hasattr(wrapper, "__wrapped__") for wrapper in _never_compiled())
    leave_unloaded()
    weight = torch.ones(1, device="cpu", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer.zero_grad()
    checkpoint.checkpoint(torch.square, weight, use_reentrant=False).backward()
    optimizer.step()
    return _COMPILER not in sys.modules


class _Counting(DispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@probe(
    "collectives of the in-process engine that autograd and modes do not see",
    names="torch._C._AutoDispatchBelowAutograd _DisableTorchDispatch _len_torch_dispatch_stack; _foreach_copy_",
    otherwise="torch.no_grad stands for it; dispatch modes see what collectives compute",
)
def _hides() -> bool:
    leaf, counting = torch.ones(2, requires_grad=True), _Counting()
    out = torch.zeros(2)
    with counting, hide_from_modes():
        copy_each([out], [leaf * 2])
    version = out._version
    with counting:
        on, _twice = modes_are_on(), leaf * 2
    return counting.count == 1 and bool(on) and not modes_are_on() and version == 1 and not out.requires_grad


@probe(
    "threads used again",
    names="torch._C._dispatch_tls_local_include_set _dispatch_tls_local_exclude_set",
    otherwise="every rank gets a new thread, 0.3 ms each",
)
def _shows_switches() -> bool:
    before = thread_switches()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = thread_switches()
    return before == thread_switches() != inside


@probe(
    "memory counted by storage",
    names="UntypedStorage._cdata",
    otherwise="the identity of the Python object stands for it",
)
def _one_storage_one_number() -> bool:
    whole = torch.empty(4, device="meta")
    return storage_id(whole) == storage_id(whole[1:]) != storage_id(torch.empty(4, device="meta"))


@probe(
    "operators of collectives known by their schemas",
    names="torch._C._dispatch_get_all_op_names OpOverload._schema _opname _overloadpacket",
    otherwise="no recording on real backends: MachineError",
)
def _has_schemas() -> bool:
    names = c10d_operators()
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
    "decisions of DTensor kept from run to run",
    names="torch.distributed.tensor._sharding_prop.ShardingPropagator.propagate_op_sharding_non_cached,"
    " DTensorSpec OpSchema OutputSharding",
    otherwise="a run of DTensor takes twice as long",
)
def _decides_once() -> bool:
    decisions, mesh = Decisions(), DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    spec = DTensorSpec(mesh, (Replicate(),), tensor_meta=TensorMeta(torch.Size([3]), (1,), torch.float32))
    with decisions.share_decisions():
        decide: Any = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding_non_cached
        one, other = (decide(OpSchema(torch.ops.aten.neg.default, (spec,), {})) for _ in "ab")
    return len(decisions._known) == 1 and one is not other and one == other


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


@probe(
    "flat parameters of FSDP1",
    names="FullyShardedDataParallel._handle, FlatParameter._fqns _shapes _params _shard_param_infos",
    otherwise="`record --values` states no place of parameters that FSDP1 has flattened",
)
def _says_what_it_holds() -> bool:
    from torch.distributed.fsdp import FullyShardedDataParallel, _flat_param  # noqa: PLC0415  (slow)

    kept = {"_fqns", "_shapes", "_params", "_shard_param_infos"}
    handle = "_handle" in inspect.getsource(sys.modules[FullyShardedDataParallel.__module__])
    return handle and kept <= _flat_param.FlatParameter.__annotations__.keys()


@probe(
    "places in groups",
    names="torch.distributed.distributed_c10d._world.pg_group_ranks",
    otherwise="`record --same-init` cuts no parameter by its shape alone",
)
def _knows_its_groups() -> bool:
    return hasattr(c10d._world, "pg_group_ranks") and isinstance(own_groups(2), list)


PROBES = tuple(one for one in tuple(globals().values()) if isinstance(one, Probe))
