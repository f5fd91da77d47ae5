"""State of a module for a process (globals, class attributes, singletons): one set a rank where it is named."""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardproof.harness.engines.engine import Engine
from shardproof.harness.engines.threads.dry import DryEngine
from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.errors import RankRaised, RequestError
from shardproof.harness.running.proof import prove
from shardproof.harness.running.ranks.execution import execute
from shardproof.reference.case import Case

MODULE = "tests_module_kept_per_rank"
SOURCE = """
import functools, logging
from collections import defaultdict

LOG = logging.getLogger("tests")
RANK = None
SEEN = []
ALSO_SEEN = SEEN
TABLE = {"inner": []}
COUNTS = defaultdict(list)
doomed = 1

class Registry:
    current = None
    members = {}
    _instance = None

    def __new__(cls):
        if cls._instance is None:
            cls._instance = super().__new__(cls)
            cls._instance.made_by = RANK
        return cls._instance

class Holder:
    def __init__(self):
        self.value, self.parts, self.inner = None, [], None

HOLDER = Holder()
HOLDER.inner = Holder()
HELD = (Holder(),)

@functools.cache
def first_rank():
    return RANK

def noted(what, into=[], *, count=True):
    into.append(what)
    return list(into)

class Notes:
    def noted(self, what, into={}):
        into[what] = True
        return sorted(into)

    @staticmethod
    def listed(what, into=[]):
        into.append(what)
        return list(into)

def counted():
    counted.calls += 1
counted.calls = 0
"""


@pytest.fixture
def module() -> Iterator[Any]:
    made = ModuleType(MODULE)
    exec(SOURCE, vars(made))
    sys.modules[MODULE] = made
    yield made
    del sys.modules[MODULE]


def _shown(m: Any) -> tuple[Any, ...]:
    """All that the module keeps, as values."""
    kept = m.RANK, list(m.SEEN), m.SEEN is m.ALSO_SEEN, list(m.TABLE["inner"]), dict(m.COUNTS), m.counted.calls
    named = hasattr(m, "doomed"), hasattr(m, "made"), hasattr(m.Registry, "made"), m.Registry.current
    held = [(h.value, list(h.parts)) for h in (m.HOLDER, m.HOLDER.inner, *m.HELD)]
    return *kept, *named, list(m.Registry.members), m.Registry._instance is None, held, vars(m.LOG).get("rank")


def _written(m: Any, rank: int) -> None:
    m.RANK = m.Registry.current = m.HOLDER.value = m.HOLDER.inner.value = rank
    m.SEEN.append(rank)
    m.TABLE["inner"].append(rank)
    m.COUNTS[rank].append(rank)
    m.Registry.members[rank] = m.Registry()
    m.HOLDER.parts.append(rank)
    m.HELD[0].parts.append(rank)
    m.counted()
    if rank == 1:
        del m.doomed
        m.made = m.Registry.made = True


def _program(rank: int) -> tuple[Any, ...]:
    """State that a rank finds at its start, and after all ranks have written."""
    m: Any = sys.modules[MODULE]
    start = _shown(m)
    _written(m, rank)
    cached = m.first_rank()
    dist.barrier()
    return start, _shown(m), cached, m.first_rank(), m.Registry().made_by, m.Registry.members[rank].made_by


@pytest.mark.parametrize("kind", [InprocEngine, DryEngine])
def test_every_rank_starts_from_the_callers_state_and_keeps_its_own(module: Any, kind: type[Engine]) -> None:
    before = _shown(module)
    with kind() as engine:
        for _ in range(2):
            ranks = engine.run(_program, world_size=3, per_rank=(MODULE,))
            assert _shown(module) == before
    for rank, (start, end, *cached) in enumerate(ranks):
        assert (start, cached) == (before, [rank] * 4)
        one, held = rank == 1, [(rank, [rank]), (rank, []), (None, [rank])]
        kept = rank, [rank], True, [rank], {rank: [rank]}, 1
        assert end == (*kept, not one, one, one, rank, [rank], False, held, None)


def test_what_calls_leave_in_defaults_is_one_set_a_rank(module: Any, engine: InprocEngine) -> None:
    """DeepSpeed's functions keep groups and settings there."""

    def program(rank: int) -> tuple[Any, ...]:
        m: Any = sys.modules[MODULE]
        first = m.noted(rank), m.Notes().noted(rank), m.Notes.listed(rank)
        dist.barrier()
        return *first, m.noted(rank + 10), m.Notes().noted(rank + 10), m.Notes.listed(rank + 10)

    for _ in range(2):
        found = engine.run(program, world_size=3, per_rank=(MODULE,))
        assert found == [tuple([[rank]] * 3 + [[rank, rank + 10]] * 3) for rank in range(3)]
    assert module.noted("after") == ["after"] and module.Notes.listed("after") == ["after"]


def test_the_callers_state_is_restored_when_a_rank_raises(module: Any, engine: InprocEngine) -> None:
    def fail(rank: int) -> None:
        _written(module, rank)
        raise ValueError(rank)

    before = _shown(module)
    with pytest.raises(RankRaised):
        engine.run(fail, world_size=2, per_rank=(MODULE,))
    assert _shown(module) == before


class _Subject:
    """Keeps its rank in the module, and returns it after another rank has run."""

    per_rank: Any = (MODULE,)

    def __init__(self) -> None:
        self.found: list[tuple[int, int]] = []

    def __call__(self, case: Case, device: torch.device) -> dict[str, torch.Tensor]:
        m: Any = sys.modules[MODULE]
        m.Registry.current = dist.get_rank()
        dist.barrier()
        self.found.append((dist.get_rank(), m.Registry.current))
        return {}


def test_a_subject_states_the_modules(module: Any, engine: InprocEngine) -> None:
    case, subject = Case.parse("mode=tp tp=2"), _Subject()
    execute(case, subject, engine, text="")
    assert sorted(subject.found) == [(0, 0), (1, 1)]
    subject.per_rank = MODULE
    with pytest.raises(RequestError, match=r"per_rank='.*' must be a tuple of words; legal: per_rank = \('meg"):
        prove(case, subject, engine)
    subject.per_rank = ("no.such",)
    with pytest.raises(RequestError, match="per_rank 'no.such': must be a module that can be imported"):
        prove(case, subject, engine)


def test_an_exception_over_shared_state_names_the_module_and_another_engine(module: Any, engine: InprocEngine) -> None:
    source = "def initialize():\n    assert RANK is None, 'is already initialized'\n    globals().update(RANK=1)"
    exec(compile(source, __file__, "exec"), vars(module))

    def program(rank: int) -> None:
        module.initialize()
        dist.barrier()

    legal = rf"if --engine pool passes, .* they are threads; legal: subject.per_rank = \('{MODULE}',\)"
    with pytest.raises(RankRaised, match=f"rank 1 of 2 raised AssertionError: is already initialized.*{legal}"):
        engine.run(program, world_size=2)
    module.RANK = None
    assert engine.run(program, world_size=2, per_rank=(MODULE,)) == [None, None]
    with pytest.raises(RankRaised) as caught:  # no other rank has run, so nothing was shared
        engine.run(lambda rank: (module.initialize(), module.initialize()), world_size=2, per_rank=(MODULE,))
    assert "--engine pool" not in caught.value.cause


def test_an_exception_that_all_ranks_raise_alike_is_not_blamed_on_shared_state(engine: InprocEngine) -> None:
    """All of them go on from one barrier, and fail on their own: on processes they would as well."""

    def program(rank: int, first: bool) -> None:
        dist.barrier()
        if rank or first:
            raise ValueError("is already initialized")
        dist.barrier()

    for first in (True, False):
        with pytest.raises(RankRaised, match="is already initialized") as caught:
            engine.run(program, first, world_size=3, per_rank=())
        assert ("--engine pool" in caught.value.cause) is not first


def test_a_question_about_cuda_where_there_is_none_names_the_context_that_answers_it(engine: InprocEngine) -> None:
    with pytest.raises(RankRaised, match="legal: subject.session = shardproof.cuda_on_cpu"):
        engine.run(lambda rank: torch.zeros(1, device="cuda"), world_size=2)
