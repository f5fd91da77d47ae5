"""Launches without processes: a small model trained in this thread, each rank's values written as its recorder would.

The model looks tokens up, has two blocks (norm, w1, gelu, w2, a residual sum) and a head, and takes Adam's steps. On
`dp` ranks a batch is split by rows, on `tp` ranks w1 and w2 by columns and rows, on `pp` ranks the blocks. `edit` is a
mistake: a function that a place of the program calls on what it has.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardproof.harness.programs.values import ValueRow, append_values, write_about

VOCAB, WIDTH, HIDDEN, SEQ, BATCH, BLOCKS, RATE = 13, 8, 12, 5, 4, 2, 1e-2
Edit = Callable[..., Any]
SHAPES = {
    "tokens.weight": (VOCAB, WIDTH),
    **{
        f"layers.{block}.{name}": shape
        for block in range(BLOCKS)
        for name, shape in (
            ("norm.weight", (WIDTH,)),
            ("w1.weight", (HIDDEN, WIDTH)),
            ("w1.bias", (HIDDEN,)),
            ("w2.weight", (WIDTH, HIDDEN)),
        )
    },
    "head.weight": (VOCAB, WIDTH),
}
CUT = {"w1.weight": 0, "w1.bias": 0, "w2.weight": 1}


def initial_values(seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Parameters before the first step: norms of ones, biases of zeros, matrices drawn."""
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for name, shape in SHAPES.items():
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64) / math.sqrt(shape[-1])
        values[name] = torch.ones(shape) if "norm" in name else torch.zeros(shape) if "bias" in name else drawn
    return {name: value.to(dtype) for name, value in values.items()}


def batch_of(step: int, masked: bool = False) -> tuple[Tensor, Tensor]:
    """Tokens and targets of a step; `masked`: the first targets of a row are ignored, as many as its number."""
    drawn = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(100 + step))
    ignored = torch.arange(SEQ) < torch.arange(BATCH)[:, None]
    return drawn[:, :-1], drawn[:, 1:].masked_fill(ignored, -100) if masked else drawn[:, 1:]


@dataclass
class Rank:
    """The values of one rank."""

    number: int
    rows: dict[int, list[ValueRow]] = field(default_factory=dict)
    tensors: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def add(self, kind: str, step: int, name: str, tensor: Tensor, **more: Any) -> None:
        place = len(self.rows.setdefault(step, []))
        key = f"{step}/{place}"
        dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        words: dict[str, Any] = {"number": sum(map(len, self.rows.values())), "key": key, "dtype": dtype, **more}
        self.rows[step].append(ValueRow(kind=kind, step=step, name=name, shape=shape, **words))
        self.tensors.setdefault(step, {})[key] = tensor.detach().clone()

    def write(self, folder: Path, world_size: int, **about: Any) -> None:
        for step, rows in sorted(self.rows.items()):
            append_values(folder, self.number, step, rows, self.tensors[step])
        write_about(folder, self.number, {"world_size": world_size, "steps": sorted(self.rows), **about})


@dataclass(kw_only=True)
class Toy:
    """A launch of the toy. `edits`: place -> what is done there instead (see `launch`)."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    micro: int = 1
    steps: int = 2
    seed: int = 0
    dtype: torch.dtype = torch.float64
    edits: Mapping[str, Edit] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    order: Callable[[int, int], list[int]] = field(default=lambda dp, rank: [*range(rank, BATCH, dp)])
    noise: float = 0.0
    masked: bool = False

    def launch(self, folder: Path) -> Path:
        """Train and write what each rank recorded. Edits:

        start(values, data rank), buffers(data rank), samples(rows, step, data rank), norm(norm),
        loss(loss, data rank, own targets),
        grad(name, gradients by data rank, data rank), clip(name, gradient, scale), after(name, new, old),
        output(name, tensor)
        """
        folder.mkdir(parents=True)
        world = self.dp * self.tp * self.pp
        ranks = [Rank(number) for number in range(world)]
        values = initial_values(self.seed, self.dtype)
        if self.noise:
            generator = torch.Generator().manual_seed(int(self.noise * 1e18) % 2**31)
            eps = torch.finfo(self.dtype).eps
            moved = {n: v * (1 + eps * (torch.rand(v.shape, generator=generator, dtype=v.dtype) - 0.5)) for n, v in
                     values.items()}  # fmt: skip
        else:
            moved = values
        weights = {data: self._begin(moved, data) for data in range(self.dp)}
        for rank in ranks:
            for name, value in self._own(weights[self._data(rank.number)], rank.number).items():
                rank.add("param", 0, self._name(name, rank.number), value)
            for name, value in self._edit("buffers", lambda data: {})(self._data(rank.number)).items():
                rank.add("buffer", 0, name, value)
        m = {name: torch.zeros_like(value) for name, value in values.items()}
        v = {name: torch.zeros_like(value) for name, value in values.items()}
        for step in range(self.steps):
            gradients = [self._backward(weights[data], data, step, ranks) for data in range(self.dp)]
            mean = self._edit("grad", lambda name, own, data: torch.stack(own).mean(0))
            own = {name: [one[name] for one in gradients] for name in values}
            grads = [{name: mean(name, own[name], data) for name in values} for data in range(self.dp)]
            for rank in ranks:
                for name, value in self._own(grads[self._data(rank.number)], rank.number).items():
                    rank.add("grad", step, self._name(name, rank.number), value)
            scales = []
            for rank in ranks:
                squares = [one.square().sum() for one in grads[self._data(rank.number)].values()]
                norm = self._edit("norm", lambda norm: norm)(torch.stack(squares).sum().sqrt())
                rank.add("norm", step, "", norm)
                scales.append(1.0 / max(1.0, float(norm)))
            self._step(step, weights, grads, scales[0], m, v, ranks)
        for rank in ranks:
            rank.write(folder, world, **self.about)
        return folder

    def _edit(self, place: str, usual: Edit) -> Edit:
        return self.edits.get(place, usual)

    def _data(self, rank: int) -> int:
        return rank // self.tp % self.dp

    def _stage(self, rank: int) -> int:
        return rank // (self.tp * self.dp)

    def _begin(self, values: Mapping[str, Tensor], data: int) -> dict[str, Tensor]:
        begin = self._edit("start", lambda values, data: values)
        return {name: value.clone().requires_grad_() for name, value in begin(dict(values), data).items()}

    def _own(self, values: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
        """The parts of full tensors that a rank holds."""
        place, stage = rank % self.tp, self._stage(rank)
        found = {}
        for name, value in values.items():
            dim = CUT.get(".".join(name.split(".")[2:]))
            block = int(name.split(".")[1]) if name.startswith("layers") else -1
            mine = (
                block * self.pp // BLOCKS == stage
                if block >= 0
                else stage == (0 if name.startswith("tokens") else self.pp - 1)
            )
            if mine:
                found[name] = value if dim is None else value.chunk(self.tp, dim)[place]
        return found

    def _name(self, name: str, rank: int) -> str:
        """A name as the rank's stage counts its layers."""
        if self.pp == 1 or not name.startswith("layers"):
            return name
        first, number, *rest = name.split(".")
        return ".".join([first, str(int(number) - self._stage(rank) * BLOCKS // self.pp), *rest])

    def _backward(self, weights: Mapping[str, Tensor], data: int, step: int, ranks: list[Rank]) -> dict[str, Tensor]:
        """Forward and backward of a data rank's micro-batches; its gradients."""
        mine = [rank for rank in ranks if self._data(rank.number) == data]
        rows = self._edit("samples", lambda rows, step, data: rows)(self.order(self.dp, data), step, data)
        for value in weights.values():
            value.grad = None
        tokens, targets = batch_of(step, self.masked)
        size = len(rows) // self.micro
        for call in range(self.micro):
            own = rows[call * size : (call + 1) * size]
            x, y = tokens[own], targets[own]
            for rank in mine:
                if self._stage(rank.number) == 0:
                    rank.add("sample", step, "args/0", x, call=call)
                    rank.add("sample", step, "args/1", y, call=call)
            outputs = self._forward(weights, x, call, step, mine)
            loss = F.cross_entropy(outputs.flatten(0, 1), y.flatten()) / self.micro
            loss = self._edit("loss", lambda loss, data, counted: loss)(loss, data, int((y >= 0).sum()))
            for rank in mine:
                if self._stage(rank.number) == self.pp - 1:
                    rank.add("loss", step, "", loss, call=call)
            if loss.requires_grad:
                loss.backward()
        return {n: torch.zeros_like(value) if value.grad is None else value.grad for n, value in weights.items()}

    def _forward(self, weights: Mapping[str, Tensor], x: Tensor, call: int, step: int, mine: list[Rank]) -> Tensor:
        edit = self._edit("output", lambda name, tensor: tensor)

        def seen(name: str, tensor: Tensor, block: int, parts: bool = False) -> Tensor:
            tensor = edit(name, tensor)
            for rank in mine:
                stage = block * self.pp // BLOCKS if 0 <= block < BLOCKS else (0 if block < 0 else self.pp - 1)
                if stage != self._stage(rank.number):
                    continue
                place, own = rank.number % self.tp, self._name(name, rank.number)
                part = tensor.chunk(self.tp, -1)[place] if parts else tensor
                rank.add("output", step, own, part, call=call)

                def keep(gradient: Tensor, rank: Rank = rank, own: str = own, place: int = place) -> None:
                    part = gradient.chunk(self.tp, -1)[place] if parts else gradient
                    rank.add("output_grad", step, own, part, call=call)

                if tensor.requires_grad:
                    tensor.register_hook(keep)
            return tensor

        h = seen("tokens", weights["tokens.weight"][x], -1)
        for block in range(BLOCKS):
            at = f"layers.{block}"
            normed = seen(f"{at}.norm", F.rms_norm(h, (WIDTH,), weights[f"{at}.norm.weight"]), block)
            w1 = seen(f"{at}.w1", F.linear(normed, weights[f"{at}.w1.weight"], weights[f"{at}.w1.bias"]), block, True)
            w2 = seen(f"{at}.w2", F.linear(F.gelu(w1), weights[f"{at}.w2.weight"]), block)
            h = seen(at, h + w2, block)
        return seen("head", F.linear(h, weights["head.weight"]), BLOCKS)

    def _step(
        self,
        step: int,
        weights: Mapping[int, dict[str, Tensor]],
        grads: list[dict[str, Tensor]],
        scale: float,
        m: dict[str, Tensor],
        v: dict[str, Tensor],
        ranks: list[Rank],
    ) -> None:
        with torch.no_grad():
            for name in list(m):
                clipped = self._edit("clip", lambda name, grad, scale: grad * scale)(name, grads[0][name], scale)
                m[name] = 0.9 * m[name] + 0.1 * clipped
                v[name] = 0.99 * v[name] + 0.01 * clipped.square()
                rate = RATE * math.sqrt(1 - 0.99 ** (step + 1)) / (1 - 0.9 ** (step + 1))
                for own in weights.values():
                    moved = own[name] - rate * m[name] / (v[name].sqrt() + 1e-8)
                    own[name].copy_(self._edit("after", lambda name, new, old: new)(name, moved, own[name]))
        for rank in ranks:
            data = self._data(rank.number)
            for kind, leaf, values in (("param_after", "", weights[data]), ("state_after", "exp_avg", m),
                                       ("state_after", "exp_avg_sq", v)):  # fmt: skip
                for name, value in self._own(values, rank.number).items():
                    rank.add(kind, step, self._name(name, rank.number), value, leaf=leaf)
