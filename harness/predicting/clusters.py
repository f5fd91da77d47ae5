"""A cluster: its devices, and the links between them from the innermost outwards; named, or read from a TOML file.

    name = "mine"
    algorithm = "best"              # ring, tree, or the cheaper of both for every call
    [device]
    name = "H100 SXM"
    memory_gib = 79.6
    efficiency = 0.5                # share of the peak that matrix products reach
    peak_tflops = { bfloat16 = 989, float32 = 67 }
    [[links]]
    name = "NVLink 4"
    ranks = 8                       # joins ranks 0 to 7, 8 to 15, ...; 0 for the outermost, which joins all
    latency_us = 3.0                # of one message
    bandwidth_gb_s = 450            # of one rank in one direction, 1e9 bytes a second
    efficiency = 0.8                # share of the bandwidth that collectives reach

Ranks fill one link's domain after the other, so an axis that runs fast (tp) lies inside and one that runs slowly (dp)
spans many. Units as in the names.

Presets: peaks, memory and line rates are the vendors', latencies and efficiencies assumptions. Sources: NVIDIA data
sheets of A100 80GB, H100 SXM and H200 SXM: dense peaks, float32 without TF32. NVLink both ways together 600 and 900
GB/s, so 300 and 450 one way. InfiniBand HDR 200 and NDR 400 Gb/s, one adapter a device, PCIe 4.0 x16 32 GB/s one way.
Assumed: half of the peak in products, 70 to 90 % of line rates in large collectives. A message takes 3 us on NVLink,
6 on PCIe, 10 on InfiniBand, 30 on Ethernet. A file with measured numbers replaces them.
"""

import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from shardproof.harness.errors import RequestError

ALGORITHMS = ("best", "ring", "tree")
_DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """An accelerator. `peak_tflops` by dtype of matrix products, dense."""

    name: str
    memory_gib: float
    peak_tflops: Mapping[str, float]
    efficiency: float = 0.5

    def __post_init__(self) -> None:
        _positive("device.memory_gib", self.memory_gib, "80")
        _share("device.efficiency", self.efficiency)
        if not self.peak_tflops:
            _wrong("device.peak_tflops", {}, "must name at least one dtype", "{ bfloat16 = 989 }")
        for dtype, peak in self.peak_tflops.items():
            if dtype not in _DTYPES:
                _wrong("device.peak_tflops", dtype, "is not a dtype of a case", " ".join(_DTYPES))
            _positive(f"device.peak_tflops.{dtype}", peak, "989")

    def flops_per_s(self, dtype: str) -> float:
        """Rate of products of this dtype. Raises RequestError when the device's peak is not known."""
        if dtype not in self.peak_tflops:
            _wrong("device.peak_tflops", " ".join(self.peak_tflops), f"does not say dtype={dtype}", f"{dtype} = 67")
        return self.peak_tflops[dtype] * 1e12 * self.efficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A class of links. `ranks` consecutive ranks are joined by it, 0 for all; bandwidth of one rank, one way."""

    name: str
    ranks: int
    latency_us: float
    bandwidth_gb_s: float
    efficiency: float = 1.0

    def __post_init__(self) -> None:
        if not self.name:
            _wrong("links.name", "''", "must not be empty", "NVLink")
        if self.ranks < 0 or self.ranks == 1:
            _wrong("links.ranks", self.ranks, "must be 0 (all) or at least 2", "8")
        if not (math.isfinite(self.latency_us) and self.latency_us >= 0):
            _wrong("links.latency_us", self.latency_us, "must not be negative", "3.0")
        _positive("links.bandwidth_gb_s", self.bandwidth_gb_s, "50")
        _share("links.efficiency", self.efficiency)

    @property
    def bytes_per_s(self) -> float:
        """Bytes that one rank sends through it in a second."""
        return self.bandwidth_gb_s * 1e9 * self.efficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices and links, innermost first; the last link joins all ranks. `note` says where the numbers come from."""

    name: str
    device: Device
    links: tuple[Link, ...]
    algorithm: str = "best"
    note: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            _wrong("algorithm", self.algorithm, "is not known", " ".join(ALGORITHMS))
        if not self.links or self.links[-1].ranks != 0:
            last = self.links[-1].ranks if self.links else "nothing"
            _wrong("links.ranks", last, "the last link must join all ranks", "0")
        if len({link.name for link in self.links}) != len(self.links):
            _wrong("links.name", [link.name for link in self.links], "must differ", "NVLink, InfiniBand")
        sizes = [link.ranks for link in self.links[:-1]]
        for inner, outer in zip(sizes, sizes[1:], strict=False):
            if inner == 0 or outer <= inner or outer % inner:
                _wrong("links.ranks", outer, f"must be a multiple of the link before, {inner}", str(2 * max(inner, 1)))
        if 0 in sizes:
            _wrong("links.ranks", 0, "only the last link may join all ranks", "8")


def read(name: str) -> Cluster:
    """The cluster of this name, or of this TOML file. Raises RequestError for a wrong one."""
    if name in PRESETS:
        return PRESETS[name]
    path = Path(name)
    if not os.path.isfile(path):  # a name that is too long for a file is none
        rule = "is neither a preset nor a file"
        raise RequestError(f"cluster={name}: {rule}; legal: {' '.join(PRESETS)} or a .toml file")
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as problem:
        raise RequestError(f"cluster={name}: is no readable TOML: {problem}; legal: {', '.join(PRESETS)}") from problem
    try:
        return _cluster(content)
    except RequestError as problem:
        raise RequestError(f"cluster={name}: {problem}") from problem


def _cluster(content: dict[str, Any]) -> Cluster:
    device = content.pop("device", None)
    links = content.pop("links", None)
    if not isinstance(device, dict):
        _wrong("device", device, "must be a table", "[device]")
    if not isinstance(links, list) or not all(isinstance(link, dict) for link in links):
        _wrong("links", links, "must be an array of tables", "[[links]]")
    made_links = tuple(Link(**_typed("links.", Link, link)) for link in links)
    return Cluster(
        device=Device(**_typed("device.", Device, device)),
        links=made_links,
        **_typed("", Cluster, content, ("device", "links")),
    )


_KINDS: dict[Any, tuple[type, ...]] = {str: (str,), int: (int,), float: (int, float), Mapping[str, float]: (dict,)}


def _typed(prefix: str, kind: type, given: dict[str, Any], made: tuple[str, ...] = ()) -> dict[str, Any]:
    """The values for a dataclass, of the right types and names."""
    known = {f.name: f for f in fields(kind) if f.name not in made}
    for name, value in given.items():
        if name not in known:
            _wrong(prefix + name, value, "is not a field", " ".join(known))
        expected = _KINDS[known[name].type]
        if isinstance(value, bool) or not isinstance(value, expected):
            _wrong(prefix + name, repr(value), f"must be a {' or '.join(k.__name__ for k in expected)}", _example(name))
    for name, one in known.items():
        if name not in given and one.default is MISSING:
            rule = f"must be given as {' or '.join(k.__name__ for k in _KINDS[one.type])}"
            _wrong(prefix + name, "nothing", rule, _example(name))
    return given


_EXAMPLES = {
    "name": '"mine"',
    "memory_gib": "80",
    "peak_tflops": "{ bfloat16 = 989 }",
    "ranks": "8",
    "latency_us": "3.0",
    "bandwidth_gb_s": "50",
    "efficiency": "0.8",
    "algorithm": '"best"',
    "note": '"measured"',
}


def _example(name: str) -> str:
    return f"{name} = {_EXAMPLES[name]}"


def _positive(name: str, value: float, legal: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        _wrong(name, value, "must be a positive number", legal)


def _share(name: str, value: float) -> None:
    if not 0 < value <= 1:
        _wrong(name, value, "must lie in (0, 1]", "0.5")


def _wrong(name: str, value: object, rule: str, legal: str) -> NoReturn:
    raise RequestError(f"{name}={value}: {rule}; legal: {legal}")


_ASSUMED = "vendors' peaks and line rates; latencies and efficiencies are assumed, not measured"
_HOPPER = {"float64": 67.0, "float32": 67.0, "bfloat16": 989.0, "float16": 989.0}
_AMPERE = {"float64": 19.5, "float32": 19.5, "bfloat16": 312.0, "float16": 312.0}
_H100 = Device(name="H100 SXM 80GB", memory_gib=79.6, peak_tflops=_HOPPER)
_H200 = Device(name="H200 SXM 141GB", memory_gib=140.4, peak_tflops=_HOPPER)
_A100 = Device(name="A100 SXM 80GB", memory_gib=80.0, peak_tflops=_AMPERE)
_A100_PCIE = Device(name="A100 PCIe 80GB", memory_gib=80.0, peak_tflops=_AMPERE)
_LAPTOP = Device(
    name="laptop core",
    memory_gib=4.0,
    peak_tflops={"float64": 0.03, "float32": 0.06, "bfloat16": 0.03, "float16": 0.03},
)
_NVLINK4 = Link(name="NVLink 4", ranks=8, latency_us=3.0, bandwidth_gb_s=450.0, efficiency=0.8)
_NVLINK3 = Link(name="NVLink 3", ranks=8, latency_us=3.0, bandwidth_gb_s=300.0, efficiency=0.8)
_IB400 = Link(name="InfiniBand NDR", ranks=0, latency_us=10.0, bandwidth_gb_s=50.0, efficiency=0.9)
_IB200 = Link(name="InfiniBand HDR", ranks=0, latency_us=10.0, bandwidth_gb_s=25.0, efficiency=0.9)
_PCIE4 = Link(name="PCIe 4.0", ranks=8, latency_us=6.0, bandwidth_gb_s=32.0, efficiency=0.7)
_ETHERNET = Link(name="Ethernet 100", ranks=0, latency_us=30.0, bandwidth_gb_s=12.5 / 8, efficiency=0.8)
_MEMORY = Link(name="memory", ranks=0, latency_us=100.0, bandwidth_gb_s=1.0, efficiency=1.0)

PRESETS = {
    cluster.name: cluster
    for cluster in (
        Cluster(name="8xH100-NVLink-IB400", device=_H100, links=(_NVLINK4, _IB400), note=_ASSUMED),
        Cluster(name="8xH200-NVLink-IB400", device=_H200, links=(_NVLINK4, _IB400), note=_ASSUMED),
        Cluster(name="8xA100-NVLink-IB200", device=_A100, links=(_NVLINK3, _IB200), note=_ASSUMED),
        Cluster(name="8xA100-PCIe-Eth100", device=_A100_PCIE, links=(_PCIE4, _ETHERNET), note=_ASSUMED),
        Cluster(name="laptop", device=_LAPTOP, links=(_MEMORY,), note="all assumed: gloo over loopback on a few cores"),
    )
}
"""Name -> cluster. Eight devices a node; Ethernet's one adapter is shared by a node's eight."""
DEFAULT = "8xH100-NVLink-IB400"
