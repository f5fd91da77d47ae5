"""Training watched from inside: replicas that differ, random streams that part, gradients that are not finite.

    with shardproof.watch(model, every=100):
        train(model)

After every hundredth step of the model's optimizer ranks exchange hashes of replicated parameters and random streams,
and flags of gradients that are not finite. The exchange is 8 bytes a parameter, one all_gather a group of replicas and
one of all ranks. Replicas and their ranks are read from DistributedDataParallel and from the placements of DTensors, or
stated as `replicas`. The output is one line at the end when all is well, six lines at the first check that finds
something. Watching changes no value and raises nothing.
"""

import functools
import operator
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardproof.harness.errors import RequestError, name_ranks, ranks_text
from shardproof.harness.verdicts.words import label_lines

_CHUNK = 1 << 20
_FACTOR, _SUMMAND = 6364136223846793005, 1442695040888963407
"""Of Knuth's linear congruential generator; it spreads the place of an element over all bits."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def watch(
    model: nn.Module, every: int = 100, *, replicas: Sequence[Any] = (), stream: TextIO | None = None
) -> "TrainingWatch":
    """A context around training that checks the model after every `every` steps of its optimizer.

    `replicas`: process groups over whose ranks the plain parameters of the model are equal, if neither
    DistributedDataParallel nor DTensor states it. Lines go to `stream`, standard error by default; one rank writes.
    Raises RequestError if `every` is below 1.
    """
    if every < 1:
        raise RequestError(f"every={every}: must be at least 1, the steps between two checks; legal: 100")
    return TrainingWatch(model, every, tuple(replicas), stream)


@dataclass(slots=True)
class _Copies:
    """The parameters that are equal over the ranks of one group, by name."""

    group: Any
    tensors: dict[str, Tensor] = field(default_factory=dict)


class TrainingWatch:
    """The result of `watch`. `step()` counts a step of a program that updates parameters without torch.optim."""

    def __init__(self, model: nn.Module, every: int, replicas: tuple[Any, ...], stream: TextIO | None) -> None:
        self._model, self._every = model, every
        self._replicas, self._stream = replicas, stream
        self._steps = self._checks = self._compared = 0
        self._optimizer: object = None
        self._found: set[str] = set()
        self._parted: set[str] = set()
        self._streams_alike = self._gradients_seen = False
        self._in_checks_s = 0.0
        self._begin_s = time.perf_counter()
        self._hook: Any = None

    def __enter__(self) -> Self:
        self._begin_s = time.perf_counter()
        self._hook = register_optimizer_step_post_hook(self._count_step)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()
        if not self._found and _rank() == 0:
            self._write(f"watch: {self._summary()}")

    def _summary(self) -> str:
        """A sentence on what was checked and what was not, if nothing was found."""
        if not self._checks:
            reason = f"there is one after every {self._every} steps of an optimizer that holds a parameter of the model"
            return f"no check in {self._steps} steps: {reason}"
        share = self._in_checks_s / max(1e-9, time.perf_counter() - self._begin_s)
        replicas = f"{self._compared} replicated parameters equal" if self._compared else "no replica to compare"
        streams = "equal" if self._streams_alike else "unlike from the first check on, so not compared"
        if not dist.is_initialized() or dist.get_world_size() == 1:
            streams = "not compared on one rank"
        gradients = "gradients finite" if self._gradients_seen else "no gradient was there"
        checks = f"{self._checks} check{'s' if self._checks > 1 else ''} in {self._steps} steps"
        return f"{checks}: {replicas}, random streams {streams}, {gradients}; {share:.2%} of the time"

    def step(self) -> None:
        """A step of the optimizer is over: check if it is time."""
        self._steps += 1
        if self._steps % self._every == 0:
            begin_s = time.perf_counter()
            with torch.no_grad():
                self._check()
            self._checks += 1
            self._in_checks_s += time.perf_counter() - begin_s

    def _count_step(self, optimizer: Any, _args: object, _kwargs: object) -> None:
        """Count the steps of one optimizer: the first that holds a parameter of the model."""
        if self._optimizer is None:
            mine = {id(parameter) for parameter in self._model.parameters()}
            stepped = (parameter for group in optimizer.param_groups for parameter in group["params"])
            self._optimizer = optimizer if any(id(parameter) in mine for parameter in stepped) else None
        if optimizer is self._optimizer:
            self.step()

    def _check(self) -> None:
        names, wrong = _named_parameters(self._model), 0
        for place, (_name, parameter) in enumerate(names):
            gradient = _local_part(parameter.grad) if parameter.grad is not None else None
            self._gradients_seen |= gradient is not None
            if gradient is not None and not bool(torch.isfinite(gradient).all()):
                wrong = place + 1
                break
        streams = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]
        states = _gather_numbers([functools.reduce(operator.xor, map(bits_hash, streams)), wrong], None)
        self._gradients([state[1] for state in states], names)
        self._streams([state[0] for state in states])
        found = self._copies()
        self._compared = sum(len(copies.tensors) for copies in found)
        for copies in found:
            hashes = _gather_numbers([bits_hash(tensor) for tensor in copies.tensors.values()], copies.group)
            self._parity(copies, hashes)

    def _gradients(self, wrong: Sequence[int], names: Sequence[tuple[str, Any]]) -> None:
        ranks = [rank for rank, place in enumerate(wrong) if place]
        if not ranks:
            return
        name = names[wrong[ranks[0]] - 1][0]
        self._report(
            "gradients",
            what=f"the gradient of {name} is not finite on {name_ranks(ranks)}",
            where=f"{name.rpartition('.')[0] or 'the model'}, after step {self._steps}",
            error=f"{len(ranks)} of {len(wrong)} ranks have inf or nan in a gradient",
            first="the first such parameter in the order of the model",
            causes="a loss that overflows (scale, learning rate, a division by zero), or a collective that read a "
            "buffer too early",
        )

    def _streams(self, hashes: Sequence[int]) -> None:
        """Compare random streams: they may rightly differ from the start, but those that were equal at first must stay
        so.
        """
        alike = len(set(hashes)) == 1
        if not self._checks:
            self._streams_alike = alike
        elif self._streams_alike and not alike:
            odd = [rank for rank, one in enumerate(hashes) if one != hashes[0]]
            self._report(
                "streams",
                what=f"the random streams of ranks have parted: {ranks_text(odd)} from 0",
                where=f"torch's default generators, between the checks after steps {self._steps - self._every} and "
                f"{self._steps}",
                error=f"{len(odd)} of {len(hashes)} ranks",
                first="they were equal at every check before",
                causes="a rank drew more numbers than others (dropout, shuffling or initialising under `if rank`), or "
                "reseeded itself",
            )

    def _parity(self, copies: _Copies, hashes: Sequence[Sequence[int]]) -> None:
        names = list(copies.tensors)
        parted = [name for place, name in enumerate(names) if len({one[place] for one in hashes}) > 1]
        if not parted or copies.group.group_name in self._parted:  # the same on all ranks of the group
            return
        self._parted.add(copies.group.group_name)
        ranks = dist.get_process_group_ranks(copies.group)
        place = names.index(parted[0])
        odd = [ranks[i] for i, one in enumerate(hashes) if one[place] != hashes[0][place]]
        tensor = copies.tensors[parted[0]]
        error = _largest_difference(tensor, copies.group)
        gradient = next((p.grad for name, p in _named_parameters(self._model) if name == parted[0]), None)
        apart = len(
            set(
                map(
                    tuple, _gather_numbers([-1 if gradient is None else bits_hash(_local_part(gradient))], copies.group)
                )
            )
        )
        self._report(
            "replicas",
            what=f"{parted[0]} differs between its replicas: {name_ranks(odd)} from {ranks[0]}",
            where=f"{parted[0].rpartition('.')[0] or 'the model'}, ranks {ranks_text(ranks)}, after step {self._steps}",
            error=f"{error:.3g} at most, where 0 is allowed; {len(parted)} of {len(names)} parameters differ",
            first=f"equal at the check after step {self._steps - self._every}" if self._checks else "first check",
            causes="its gradients differ too: their sum over the group is missing, or is taken over another group"
            if apart > 1
            else "its gradients are equal: it was initialised, or updated, differently on these ranks",
            writer=ranks[0],
        )

    def _report(self, about: str, *, writer: int = 0, **words: str) -> None:
        if about in self._found:
            return
        self._found.add(about)
        steps = f"{self._steps - 1}:{self._steps + 1}"
        repeat = f"record these steps: torchrun ... -m shardproof.record --steps {steps} ..."
        if _rank() == writer:
            self._write("\n".join(label_lines({**words, "what": f"{words['what']} (check {about})", "repeat": repeat})))

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            (self._stream or sys.stderr).write(f"{text}\n")

    def _copies(self) -> list[_Copies]:
        """The replicated parameters by group, without groups of one rank."""
        wrapped = [module for module in self._model.modules() if isinstance(module, DistributedDataParallel)]
        inside = {id(p): module.process_group for module in wrapped for p in module.parameters()}
        found: dict[str, _Copies] = {}
        for name, parameter in _named_parameters(self._model):
            for group in _replica_groups(parameter, inside.get(id(parameter)), self._replicas):
                if dist.get_world_size(group) > 1:
                    found.setdefault(group.group_name, _Copies(group)).tensors[name] = _local_part(parameter)
        return [found[name] for name in sorted(found)]


def _named_parameters(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name.removeprefix("module."), parameter) for name, parameter in model.named_parameters()]


def _replica_groups(parameter: Any, wrapped: Any, stated: Sequence[Any]) -> Iterator[Any]:
    """The groups over which a parameter is replicated."""
    if not dist.is_initialized():
        return
    if hasattr(parameter, "placements"):
        mesh = parameter.device_mesh
        yield from (mesh.get_group(dim) for dim, placed in enumerate(parameter.placements) if placed.is_replicate())
    elif stated:
        yield from stated
    if wrapped is not None:
        yield wrapped


def _local_part(tensor: Any) -> Tensor:
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found.detach()


def bits_hash(tensor: Tensor) -> int:
    """A hash of 64 bits, computed on the device: equal for equal bits at equal places, and hardly ever for others."""
    flat = tensor.contiguous().view(-1)
    bits = flat.view(_BITS[flat.element_size()]) if flat.element_size() in _BITS else flat.view(torch.uint8)
    weights = torch.arange(1, min(_CHUNK, len(bits)) + 1, device=bits.device, dtype=torch.int64) * _FACTOR + _SUMMAND
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for chunk in bits.split(_CHUNK):
        mixed = (chunk.to(torch.int64) + 1) * weights[: len(chunk)]  # wraps around, as it should
        total = total * 31 + (mixed ^ (mixed >> 29)).sum()
    return int(total)


def _gather_numbers(numbers: Sequence[int], group: Any) -> list[list[int]]:
    """These numbers of every rank of the group (None: all ranks), in group order."""
    if not dist.is_initialized():
        return [list(numbers)]
    device = "cuda" if "nccl" in dist.get_backend(group) else "cpu"
    mine = torch.tensor(list(numbers), dtype=torch.int64, device=device)
    all_of_them = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_of_them, mine, group=group)
    return [[int(number) for number in one.tolist()] for one in all_of_them]


def _largest_difference(tensor: Tensor, group: Any) -> float:
    """The largest difference of a tensor from that of the first rank of its group, over all ranks of the group."""
    first = tensor.clone()
    dist.broadcast(first, dist.get_process_group_ranks(group)[0], group=group)
    most = (tensor.double() - first.double()).abs().max().reshape(1)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return float(most.item())


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
