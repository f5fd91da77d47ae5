"""What a launcher's environment says: torchrun's words, SLURM's where they are missing, one message where both are."""

from __future__ import annotations

import socket

import pytest

from harness.engines.processes.launched.environment import TORCHRUN_LINE, Launched, launched
from harness.errors import MachineError, RequestError

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "gpu[07-09,12],login1",
    "SLURM_JOB_ID": "123456",
}


def test_torchrun_says_where_a_process_stands() -> None:
    place = launched(TORCHRUN)
    assert place == Launched(rank=3, world_size=4, local_rank=1, master_addr="10.0.0.7", master_port=29500)
    assert not place.drives
    assert launched({**TORCHRUN, "RANK": "0"}).drives


def test_slurm_stands_for_what_torchrun_did_not_say() -> None:
    place = launched(SLURM)
    assert (place.rank, place.world_size, place.local_rank, place.master_addr) == (5, 8, 1, "gpu07")
    assert 1024 < place.master_port < 32768, "no port that the system hands out by itself"
    assert place.master_port == launched({**SLURM, "SLURM_PROCID": "0"}).master_port
    assert place.master_port != launched({**SLURM, "SLURM_JOB_ID": "123457"}).master_port
    given = launched({**SLURM, "MASTER_ADDR": "there", "MASTER_PORT": "29501"})
    assert (given.master_addr, given.master_port) == ("there", 29501)


def test_torchrun_started_by_slurm_is_torchrun() -> None:
    assert launched({**SLURM, **TORCHRUN}).rank == 3


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("one", "one"), ("a,b", "a"), ("n[3]", "n3"), ("n[03-05]", "n03"), ("r1n[2,4]-ib,x", "r1n2-ib"), ("a-1,b", "a-1")],
)
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    assert launched({**SLURM, "SLURM_JOB_NODELIST": nodes}).master_addr == first


@pytest.mark.parametrize("missing", [*TORCHRUN, *SLURM])
def test_a_word_that_is_missing_is_named_beside_a_line_that_sets_it(missing: str) -> None:
    words = TORCHRUN if missing in TORCHRUN else SLURM
    rest = {name: value for name, value in words.items() if name != missing}
    with pytest.raises(RequestError) as problem:
        launched(rest)
    assert str(problem.value).startswith(f"engine=torchrun: {missing} is not set")
    assert str(problem.value).endswith(f"legal: {TORCHRUN_LINE}")


def test_no_environment_at_all_shows_the_line_to_type() -> None:
    with pytest.raises(RequestError, match=r"RANK is not set.*SLURM_PROCID.*legal: torchrun --nnodes"):
        launched({})


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("RANK", "4", "from 0 to 3"),
        ("RANK", "-1", "from 0 to 3"),
        ("WORLD_SIZE", "four", "from 1"),
        ("WORLD_SIZE", "0", "from 1"),
        ("LOCAL_RANK", "1.5", "from 0"),
        ("MASTER_PORT", "65536", "from 1 to 65535"),
    ],
)
def test_a_word_that_cannot_be_is_refused_with_its_rule(name: str, value: str, rule: str) -> None:
    with pytest.raises(RequestError, match=rf"engine=torchrun: {name}={value} must be a whole number {rule}; legal:"):
        launched({**TORCHRUN, name: value})


def test_a_launcher_of_slurm_says_a_list_of_nodes() -> None:
    with pytest.raises(RequestError, match=r"SLURM_JOB_NODELIST=\[1\] must be a list of hosts"):
        launched({**SLURM, "SLURM_JOB_NODELIST": "[1]"})


def test_a_place_where_nobody_waits_is_a_failure_of_the_machine() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound and not listening: nobody answers there
        port = held.getsockname()[1]
        alone = Launched(rank=1, world_size=2, local_rank=1, master_addr="127.0.0.1", master_port=port)
        with pytest.raises(MachineError, match=rf"rank 1 of 2 cannot meet the others at tcp://127.0.0.1:{port}"):
            alone.store(0.5)
