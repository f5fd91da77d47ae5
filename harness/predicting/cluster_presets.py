"""Named clusters. Peaks, memory and line rates are the vendors'; latencies and efficiencies are assumptions.

Sources: NVIDIA data sheets of A100 80GB, H100 SXM and H200 SXM (dense tensor-core peaks; NVLink both ways together 600
and 900 GB/s, so 300 and 450 one way), InfiniBand HDR 200 and NDR 400 Gb/s, one adapter a device, PCIe 4.0 x16 32 GB/s
one way. Assumed: half of the peak in products, 80 to 90 % of line rates in large collectives, 3 us a message inside a
node and 10 us between nodes. A file with measured numbers replaces them (harness.predicting.clusters).
"""

from __future__ import annotations

from harness.predicting.clusters import Cluster, Device, Link

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
