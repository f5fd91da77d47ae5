"""The catalogue of mutants keeps its own rules: every text to change is there, every mode and family is covered."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter

import pytest

from harness.checking.checks import CHECKS
from harness.diagnosing.rules.causes import CAUSES
from harness.ledger import PHASES
from reference.case import Case
from reference.language.modes import MODES
from suites.mutants.catalogue import FAMILIES, HELD_BACK, MUTANTS, VARIANT_ROWS, of_file
from suites.mutants.draws import drawn, showing, work
from suites.mutants.mutant import Change, Mutant, holds

_ALL = (*MUTANTS, *VARIANT_ROWS, *HELD_BACK)


def test_there_are_sixty_and_all_have_names_of_their_own() -> None:
    names = Counter(mutant.name for mutant in _ALL)
    assert len(MUTANTS) >= 60
    assert set(names.values()) == {1}


_SOURCE = (
    r"B-\d+|#\d+|(around|experts|modes)\.md|Megatron|torch|DeepSpeed|InternEvo|picotron|TE |verl|VeOmni|accelerate|seed"
)


def test_bugs_of_the_axes_name_their_sources_and_most_are_of_the_catalogues() -> None:
    """Rows of bugs.md (B-..) and threads of field.md (#..), each once, beside the variants of around.md 19."""
    files = ("context", "data_parallel", "gradients", "pipelines", "recompute")
    axes = [mutant for name in files for mutant in of_file(f"open/{name}")]
    assert [mutant.name for mutant in axes if not re.search(_SOURCE, mutant.stands_for)] == []
    rows = {row for mutant in axes for row in re.findall(r"B-\d+|\w+ ?#\d+", mutant.stands_for)}
    found = [mutant for mutant in axes if re.search(r"B-\d+|#\d+", mutant.stands_for) and "19" not in mutant.stands_for]
    assert len(found) >= 25 and len(rows) >= 25
    assert not re.search(_SOURCE, "somebody may forget it")


@pytest.mark.parametrize("family", [*FAMILIES, "held_back"])
def test_every_text_to_change_occurs_once_and_leaves_a_program(family: str) -> None:
    for mutant in FAMILIES.get(family, HELD_BACK):
        for module, text in mutant.sources().items():
            compile(text, module, "exec")


def test_every_mode_hosts_mutants_of_every_family() -> None:
    for family, mutants in FAMILIES.items():
        assert {mode for mutant in mutants for mode in mutant.modes} == set(MODES), family


def test_every_row_says_what_it_stands_for_and_what_must_be_told_of_it() -> None:
    for mutant in _ALL:
        assert mutant.stands_for and mutant.modes and set(mutant.modes) <= set(MODES), mutant.name
        assert bool(mutant.kills) != bool(mutant.equivalent), mutant.name
        assert set(mutant.kills.split("|")) <= {*CHECKS, "run", ""}, mutant.name
        assert set(mutant.phase.split("|")) <= {*PHASES, ""}, mutant.name
        assert set(mutant.cause.split("|")) <= {*CAUSES, ""}, mutant.name
        assert "|" not in mutant.kills or not mutant.alone, mutant.name
        assert mutant.held_back == (mutant in HELD_BACK), mutant.name


def test_the_profile_draws_cases_that_show_every_mutant_in_every_mode(request: pytest.FixtureRequest) -> None:
    """Each in one of its modes in turn, those of one property in the same; in the profile `deep`, in every mode."""
    deep = request.config.getoption("hypothesis_profile", None) == "deep"
    every = [(mutant, sorted(mutant.modes)) for mutant in (*MUTANTS, *HELD_BACK)]
    properties = list(dict.fromkeys(tuple(mutant.suite.items()) for mutant, _ in every))
    place = {mutant.name: properties.index(tuple(mutant.suite.items())) or i for i, (mutant, _) in enumerate(every)}
    turns = [(mutant, modes if deep else [modes[place[mutant.name] % len(modes)]]) for mutant, modes in every]
    known = [(mutant, mode) for mutant, modes in turns for mode in modes]
    assert [f"{mutant.name} in {mode}" for mutant, mode in known if not showing(mutant, mode)] == []


def test_draws_are_the_same_in_every_process_and_smallest_first() -> None:
    first = drawn("isp", {})
    assert list(map(work, first)) == sorted(map(work, first))
    program = "from suites.mutants.draws import drawn; print(*drawn('isp', {})[:9], sep='\\n')"
    again = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert again.splitlines() == [str(case) for case in first[:9]]


@pytest.mark.parametrize(
    ("condition", "text", "answer"),
    [
        ("", "mode=tp", True),
        ("bias=true", "mode=tp", True),
        ("bias=false", "mode=tp", False),
        ("positions=rope|learned", "mode=tp", True),
        ("embedding=hidden", "mode=mtp preset=tiny-internlm2", True),
        ("recompute!=full", "mode=tp recompute=full", False),
        ("batch>1 tp<3", "mode=tp batch=2", True),
        ("kv_heads<tp", "mode=isp tp=4 kv_heads=2", True),
        ("kv_heads>tp", "mode=tp tp=2 kv_heads=2", False),
        ("wp!=tp", "mode=isp tp=2 wp=2", False),
        ("wp!=tp wdp>1", "mode=isp tp=4 wp=2 kv_heads=4", True),
        ("padding>0", "mode=tp vocab=509", True),
        ("ffn%tp>0", "mode=autotp tp=2 ffn=33", True),
        ("ffn%tp=0", "mode=autotp tp=2 ffn=33", False),
    ],
)
def test_conditions_read_the_words_of_a_case(condition: str, text: str, answer: bool) -> None:
    assert holds(condition, Case.parse(text)) is answer


def test_a_condition_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="condition=bias: must be key=value"):
        holds("bias", Case.parse("mode=tp"))


def test_a_text_that_is_gone_is_told() -> None:
    gone = Mutant(
        name="gone",
        stands_for="-",
        modes={"tp": ""},
        changes=(Change(module="parallel.layers.norm", old="no such text", new=""),),
    )
    lost = "gone: parallel.layers.norm: the lines to change are not there, and nowhere else: 'no such text'"
    with pytest.raises(ValueError, match=lost):
        gone.sources()
