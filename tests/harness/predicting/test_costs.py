"""The cost model against numbers worked out by hand, clusters against wrong files, the clock against small programs."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardproof.harness.errors import RequestError
from shardproof.harness.ledger import Event
from shardproof.harness.predicting.clusters import PRESETS, Cluster, Device, Link, read
from shardproof.harness.predicting.costs import Route, route, seconds
from shardproof.harness.predicting.meter import END, START, WAIT, Stretch
from shardproof.harness.predicting.timeline import Times, spent_until
from tests.harness.recording.toy_calls import an_event

DEVICE = Device(name="d", memory_gib=1, peak_tflops={"float32": 2.0}, efficiency=0.5)
INNER = Link(name="inner", ranks=4, latency_us=1, bandwidth_gb_s=100)
OUTER = Link(name="outer", ranks=0, latency_us=10, bandwidth_gb_s=10)
TWO_LEVELS = Cluster(name="c", device=DEVICE, links=(INNER, OUTER))
FLAT = Route(size=4, link="x", latency_s=1e-6, byte_s=1e-9, crossing=((0.75, 1e-9),))
MIB = 2**20


@pytest.mark.parametrize(
    ("op", "algorithm", "expected"),
    [
        ("all_reduce", "ring", 6e-6 + 1.5 * MIB * 1e-9),
        ("all_reduce", "tree", 4e-6 + 2.0 * MIB * 1e-9),
        ("all_reduce", "best", 6e-6 + 1.5 * MIB * 1e-9),
        ("all_gather", "ring", 3e-6 + 0.75 * MIB * 1e-9),
        ("reduce_scatter", "tree", 3e-6 + 0.75 * MIB * 1e-9),
        ("broadcast", "ring", 3e-6 + MIB * 1e-9),
        ("reduce", "best", 2e-6 + MIB * 1e-9),
        ("all_to_all", "best", 3e-6 + 0.75 * MIB * 1e-9),
        ("gather", "best", 3 * (1e-6 + MIB * 1e-9)),
        ("send", "best", 1e-6 + MIB * 1e-9),
        ("barrier", "ring", 4e-6),
    ],
)
def test_a_call_over_four_ranks_costs_its_formula(op: str, algorithm: str, expected: float) -> None:
    assert seconds(op, MIB, FLAT, algorithm) == pytest.approx(expected, rel=1e-12)


def test_small_messages_go_by_tree_and_large_ones_by_ring() -> None:
    wide = Route(size=64, link="x", latency_s=1e-5, byte_s=1e-9)
    assert seconds("all_reduce", 8, wide) == seconds("all_reduce", 8, wide, "tree")
    assert seconds("all_reduce", 2**30, wide) == seconds("all_reduce", 2**30, wide, "ring")


def test_a_group_of_one_costs_nothing_and_an_unknown_op_is_refused() -> None:
    assert seconds("broadcast", MIB, route((3,), TWO_LEVELS)) == 0.0
    with pytest.raises(ValueError, match=r"op=teleport: has no formula; legal: all_reduce"):
        seconds("teleport", 1, FLAT)


def test_placement_chooses_the_link() -> None:
    inside = route((4, 5, 6, 7), TWO_LEVELS)
    assert (inside.link, inside.latency_s, inside.byte_s) == ("inner", 1e-6, 1e-11)
    apart = route((0, 4, 8, 12), TWO_LEVELS)
    assert apart.link == "outer" and [apart.latency_s, apart.byte_s] == pytest.approx([1e-5, 1e-10])
    assert route((3, 4), TWO_LEVELS).link == "outer", "neighbours, but not in one domain"
    both = route(range(8), TWO_LEVELS)  # four ports of 10 GB/s a domain
    assert both.link == "outer" and both.byte_s == pytest.approx(1 / 40e9)
    assert both.crossing == ((3 / 8, 1e-11), (4 / 8, 1e-10))
    assert seconds("all_to_all", 8000, both) == pytest.approx(7e-5 + 4000 * 1e-10)
    fast = Cluster(name="c", device=DEVICE, links=(INNER, Link(name="o", ranks=0, latency_us=1, bandwidth_gb_s=90)))
    assert route(range(8), fast).byte_s == pytest.approx(1e-11), "no faster than inside"


def _event(index: int, *, is_async: bool = False) -> Event:
    return an_event(phase="forward", is_async=is_async, call_index=index, step=0)


def _played(
    *moves: tuple[int, str, int], events: list[Event], links: str = "aaaa", ends: Sequence[int] = ()
) -> list[Times]:
    """A clock of one FLOP a second, on which every call takes ten."""
    stretches = [Stretch(*move) for move in moves]
    price = lambda event: (links[event.call_index], 10.0)  # noqa: E731
    return spent_until(ends or [len(stretches)], stretches, events, 1.0, price)


def test_a_call_that_is_waited_for_at_once_is_exposed() -> None:
    first, both = _played((4, START, 0), (3, END, -1), events=[_event(0)], ends=(1, 2))
    assert first == Times(compute_s=4, exposed_s={"forward": 10}, hidden_s={"forward": 0})
    assert both == Times(compute_s=7, exposed_s={"forward": 10}, hidden_s={"forward": 0}) and both.total_s == 17


def test_a_call_travels_while_the_rank_computes() -> None:
    events = [_event(0, is_async=True)]
    (times,) = _played((4, START, 0), (7, WAIT, 0), (1, END, -1), events=events)
    assert times == Times(compute_s=12, exposed_s={"forward": 3}, hidden_s={"forward": 7})
    (times,) = _played((4, START, 0), (70, WAIT, 0), (1, END, -1), events=events)
    assert times == Times(compute_s=75, exposed_s={}, hidden_s={"forward": 10})


def test_calls_queue_on_one_link_and_not_on_two() -> None:
    events = [_event(0, is_async=True), _event(1, is_async=True)]
    moves = ((0, START, 0), (0, START, 1), (0, WAIT, 0), (0, WAIT, 1), (0, END, -1))
    assert _played(*moves, events=events)[0].total_s == 20
    assert _played(*moves, events=events, links="ab")[0].total_s == 10


FILE = """
name = "mine"
algorithm = "ring"
[device]
name = "H100"
memory_gib = 80
efficiency = 0.4
peak_tflops = { bfloat16 = 989 }
[[links]]
name = "NVLink"
ranks = 8
latency_us = 3.0
bandwidth_gb_s = 450
[[links]]
name = "IB"
ranks = 0
latency_us = 10
bandwidth_gb_s = 50
efficiency = 0.9
"""


def test_a_cluster_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    cluster = read(str(path))
    assert (cluster.name, cluster.algorithm, cluster.device.efficiency) == ("mine", "ring", 0.4)
    assert [(link.name, link.ranks) for link in cluster.links] == [("NVLink", 8), ("IB", 0)]
    assert cluster.links[1].bytes_per_s == pytest.approx(45e9)
    assert math.isclose(cluster.device.flops_per_s("bfloat16"), 989e12 * 0.4)
    assert read("laptop") is PRESETS["laptop"]
    with pytest.raises(RequestError, match=r"device.peak_tflops=bfloat16: does not say dtype=float64; legal: float64"):
        cluster.device.flops_per_s("float64")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("memory_gib = 80", "memory_gib = -1", "device.memory_gib=-1: must be a positive number; legal: 80"),
        ("memory_gib = 80", "", "device.memory_gib=nothing: must be given as int or float; legal: memory_gib = 80"),
        ("efficiency = 0.4", "efficiency = 1.4", r"device.efficiency=1.4: must lie in \(0, 1\]; legal: 0.5"),
        ("bfloat16 = 989", "int3 = 9", "device.peak_tflops=int3: is not a dtype of a case; legal: float64"),
        ("bfloat16 = 989", "", "device.peak_tflops={}: must name at least one dtype"),
        ("ranks = 8", "ranks = 1", r"links.ranks=1: must be 0 \(all\) or at least 2; legal: 8"),
        ("ranks = 0", "ranks = 64", "links.ranks=64: the last link must join all ranks; legal: 0"),
        ("ranks = 8", "ranks = 0", "links.ranks=0: only the last link may join all ranks; legal: 8"),
        ("latency_us = 10", "latency_us = -3", "links.latency_us=-3: must not be negative; legal: 3.0"),
        ('name = "IB"', 'name = "NVLink"', "must differ; legal: NVLink, InfiniBand"),
        ('"ring"', '"magic"', "algorithm=magic: is not known; legal: best ring tree"),
        ("[device]", "[devices]", r"device=None: must be a table; legal: \[device\]"),
        ('name = "mine"', 'nam = "mine"', "nam=mine: is not a field; legal: name algorithm note"),
        ("[device]", "[device", "is no readable TOML"),
    ],
)
def test_a_wrong_file_is_one_message(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "wrong.toml"
    assert old in FILE
    path.write_text(FILE.replace(old, new, 1))
    with pytest.raises(RequestError, match=message) as told:
        read(str(path))
    assert str(told.value).startswith(f"cluster={path}: ") and "\n" not in str(told.value).split(":")[0]


def test_an_unknown_cluster_names_the_known_ones() -> None:
    with pytest.raises(RequestError, match=r"cluster=8xB300: is neither a preset nor a file; legal: 8xH100"):
        read("8xB300")
