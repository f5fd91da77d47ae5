"""nvtx ranges: steps, phases, modules and collectives as the ledger has them; a domain that drops them is refused."""

import json
import operator
import os
from contextlib import ExitStack
from typing import Any, NamedTuple

import nvtx
import pytest
import torch
from torch import Tensor

from shardproof.harness.engines.threads.inproc import InprocEngine
from shardproof.harness.errors import MachineError
from shardproof.harness.ledger import OPS
from shardproof.harness.recording import ranges
from shardproof.harness.recording.ranges import DOMAIN, Ranges, open_domain
from shardproof.harness.recording.recorder import Recorder
from shardproof.harness.running.ranks.execution import execute
from shardproof.harness.witnesses.chosen import watch_steps
from shardproof.parallel.subject import subject
from shardproof.reference.case import Case
from tests.harness.recording.toy_calls import PLAIN, Around, Model, Voice, checkpointed, input_BD


class Said(NamedTuple):
    message: str = ""
    color: Any = None
    category: str = ""
    payload: int | None = None


class Tape:
    """A domain that writes down its ranges: "> x" opens, "< x" closes, ". x" marks."""

    get_event_attributes = Said

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.said: list[Said] = []
        self._stack: list[Said] = []

    def push_range(self, attributes: Any) -> None:
        self._stack.append(attributes)
        self._tell(">", attributes)

    def pop_range(self) -> None:
        self._tell("<", self._stack.pop())

    def start_range(self, attributes: Any) -> Said:
        return self._tell(">", attributes)

    def end_range(self, range_id: Any) -> None:
        self._tell("<", range_id)

    def mark(self, attributes: Any) -> None:
        self._tell(".", attributes)

    def still_open(self) -> int:
        """How many ranges were never closed."""
        signs = [line[0] for line in self.lines]
        return signs.count(">") - signs.count("<")

    def of(self, *categories: str) -> list[str]:
        return [line for line, said in zip(self.lines, self.said, strict=True) if said.category in categories]

    def _tell(self, sign: str, said: Said) -> Said:
        self.lines.append(f"{sign} {said.message}")
        self.said.append(said)
        return said


def taped(tape: Tape | None, around: Around = PLAIN, chosen: range | None = None) -> Recorder:
    """Two steps of the toy model, its layers called `around`, drawn on the tape, or chosen ones."""
    ranges = None if tape is None else Ranges(tape, waiting=chosen is not None)
    with ExitStack() as entered:
        recorder = entered.enter_context(Recorder("seed=0", "tp", 2, {"tp": ((0, 1),)}, ranges=ranges))
        entered.enter_context(recorder.on_rank(0))
        if ranges is not None and chosen is not None:
            entered.enter_context(watch_steps(chosen, (1, 2), lambda: ranges.draw_rank(0)))
        voice = Voice(recorder)
        model = Model(voice, around)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _step in range(2):
            voice.say("broadcast")
            value = model(input_BD()).sum()
            voice.say("all_reduce", is_async=True)
            value.backward()
            voice.say("all_reduce")
            optimizer.step()
    return recorder


def test_steps_phases_modules_and_calls_are_drawn_as_in_the_ledger() -> None:
    tape = Tape()
    events = taped(tape).events()
    phases = ["> forward", "< forward", "> loss", "< loss", "> backward", "< backward", "> step", "< step"]
    assert tape.of("phase") == phases * 2
    assert tape.of("step") == ["> step 0", "< step 0", "> step 1", "< step 1"]
    assert [said.payload for said in tape.said if said.category == "step"] == [0, 0, 1, 1]
    layer = ["> layers.0", "> layers.0.a", "< layers.0.a", "> layers.0.b", "< layers.0.b", "< layers.0"]
    assert tape.of("module")[:12] == layer + [line.replace("layers.0", "layers.1") for line in layer]
    ops = {event.op for event in events}
    both = zip(tape.lines, tape.said, strict=True)
    drawn = [(line, said) for line, said in both if said.category.partition(" ")[0] in ops]
    opened = [(said.category.partition(" ")[0], said.payload, said.message) for line, said in drawn if line[0] in ">."]
    assert {said.category.partition(" ")[2] for _, said in drawn} == {"0,1 float32"}
    assert opened == [(e.op, e.payload_bytes, f"{e.region} {e.op}".strip()) for e in events]
    assert [line[0] for line, said in drawn if said.message == "all_reduce"] == [".", ">", "<"] * 2
    inside = ["> layers.0.a all_reduce", "< layers.0.a all_reduce"]
    at = tape.lines.index(inside[0])
    assert tape.lines[at - 1 : at + 3] == ["> layers.0.a", *inside, "< layers.0.a"]
    first, last = (json.loads(said.message) for said in tape.said if said.category == "rank")
    assert first == {"rank": 0, "pid": os.getpid(), "world_size": 2, "mode": "tp", "case": "seed=0"}
    assert last == {"rank": 0, "calls": len(events)}
    assert tape.still_open() == 0


def test_chosen_steps_are_drawn_as_in_the_whole_run_and_nothing_else_is() -> None:
    whole = Tape()
    events = taped(whole).events()
    ends = whole.lines.index("< step 0") + 1
    for step, lines in enumerate((whole.lines[1:ends], whole.lines[ends:-1])):
        tape = Tape()
        taped(tape, chosen=range(step, step + 1))
        assert tape.lines[1:-1] == lines
        calls = len([event for event in events if event.step == step])
        assert json.loads(tape.said[-1].message) == {"rank": 0, "calls": calls}
        assert tape.still_open() == 0


def test_ranges_that_begin_and_end_inside_of_modules_close_what_they_opened() -> None:
    tape = Tape()
    ranges = Ranges(tape, waiting=True)
    drawn = ExitStack()

    def around(module: torch.nn.Module, x_BD: Tensor) -> Any:
        if not tape.lines:
            drawn.enter_context(ranges.draw_rank(0))
        return module(x_BD)

    class Ending(Model):
        def forward(self, x_BD: Tensor) -> Tensor:
            output_BD = super().forward(x_BD)
            drawn.close()
            return output_BD

    with Recorder("", "tp", 2, {}, ranges=ranges) as recorder, recorder.on_rank(0):
        voice = Voice(recorder)
        Ending(voice, around)(input_BD())
        voice.say()
    assert tape.still_open() == 0
    assert tape.of("module").count("> layers.1.b") == 1


def test_recompute_interrupts_backward_and_ranges_change_no_event() -> None:
    def told(recorder: Recorder) -> list[tuple[Any, ...]]:
        return [(e.step, e.microbatch, e.phase, e.region, e.op) for e in recorder.events()]

    tape = Tape()
    drawn, bare = (told(taped(on, checkpointed(True))) for on in (tape, None))
    assert drawn == bare
    assert len(bare) == 2 * (4 + 4 + 4 + 3)
    between = tape.of("phase")[4 : tape.of("phase").index("> step")]
    once = ["> backward", "< backward", "> recompute", "< recompute"]
    assert between == [*once, *once, "> backward", "< backward"]


def test_backward_ends_when_it_ends_and_a_raising_program_closes_its_ranges() -> None:
    class Broken(Model):
        def forward(self, x_BD: Tensor) -> Tensor:
            super().forward(x_BD)
            raise KeyError("broken")

    tape = Tape()
    with Recorder("", "tp", 2, {}, ranges=Ranges(tape)) as recorder, pytest.raises(KeyError), recorder.on_rank(0):
        value = Model(Voice(recorder))(input_BD()).sum()
        assert tape.lines[-1] == "> loss"
        value.backward()
        assert tape.lines[-1] == "< backward", "and not with what follows"
        Broken(Voice(recorder))(input_BD())
    assert tape.still_open() == 0
    assert len(tape.of("module")) == 24


class DummyDomain:
    """Domain that nvtx hands out when it finds no listener."""


def test_a_domain_that_drops_everything_under_a_tool_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvtx, "get_domain", lambda name: DummyDomain())
    monkeypatch.setattr("shardproof.harness.recording.ranges._asking_nobody", DummyDomain)
    monkeypatch.delenv("NVTX_INJECTION64_PATH", raising=False)
    assert isinstance(open_domain(), DummyDomain)
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "/opt/nsys/libToolsInjection64.so")
    with pytest.raises(MachineError, match=r"nvtx .* records nothing .*libToolsInjection64.so.*Update Nsight Systems"):
        open_domain()


def test_the_way_around_the_dropped_domain_works_on_this_nvtx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "/nowhere")
    monkeypatch.setattr(nvtx, "get_domain", lambda _name: DummyDomain())
    domain = open_domain()
    assert isinstance(domain, nvtx.Domain)
    says = domain.get_event_attributes(message=f"{DOMAIN} test", category="test", payload=3)
    domain.push_range(says)
    domain.pop_range()
    domain.mark(says)
    domain.end_range(domain.start_range(says))


def test_a_run_is_drawn_only_when_a_tool_listens(monkeypatch: pytest.MonkeyPatch, engine: InprocEngine) -> None:
    case = Case.parse("layers=1 steps=1 micro=1 tp=2 overlap=false")
    drawn: list[Tape] = []

    def opened() -> Tape:
        drawn.append(Tape())
        return drawn[-1]

    monkeypatch.setattr(ranges, "open_domain", opened)
    monkeypatch.delenv("NVTX_INJECTION64_PATH", raising=False)
    execute(case, subject, engine, text=str(case))
    assert drawn == []
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "/tool/libInjection.so")
    events = execute(case, subject, engine, text=str(case)).events
    (tape,) = drawn
    opened_lines = [said for line, said in zip(tape.lines, tape.said, strict=True) if line[0] != "<"]
    calls = [(said.category.partition(" ")[0], said.payload) for said in opened_lines if said.payload is not None]
    calls = [call for call in calls if call[0] in OPS]
    key = operator.itemgetter(0, 1)
    assert sorted(calls, key=key) == sorted(((event.op, event.payload_bytes) for event in events), key=key)
    assert tape.still_open() == 0
