"""Wrong forms of what people train with, as public issues describe them: Muon, LoRA, mixers on packed rows, losses.

They are records of `bugs/subjects`, planted in the tutorials of `suites/subjects`. Truth and ranks are of the changed
file both, so that a bug which both share is found by no comparison of the two.
"""

from importlib.util import find_spec

import pytest

import shardproof
from shardproof.bugs.anchors import change_sources
from shardproof.bugs.planting import plant_subject
from shardproof.bugs.record import Bug
from shardproof.harness.engines.threads.inproc import InprocEngine
from tests.deep import deep
from tests.harness.proofs import contradicted
from tests.harness.running.locating.planting import bugs_of, place

BUGS = bugs_of("subjects")
QUICK = (
    *("muon-stale-heads", "lora-replicated-factor-not-summed", "taps-cross-borders", "whitened-by-rank"),
    *("refit-copies-updated", "scales-of-the-receiver", "tied-table-averaged"),
)
"""One of each tutorial."""
NEEDS = {"lora_peft": "peft", "subjects.trainer:": "accelerate"}
OTHERS = deep("two CPU minutes in all", *(name for name in BUGS if name not in QUICK))


@pytest.mark.filterwarnings("ignore")  # those of peft and transformers
@pytest.mark.parametrize("name", [*QUICK, *OTHERS])
def test_a_wrong_form_is_found_by_its_check_at_its_place(name: str, engine: InprocEngine) -> None:
    bug: Bug = BUGS[name]
    needed = next((package for subject, package in NEEDS.items() if subject in bug.system), "torch")
    if find_spec(needed) is None:
        pytest.skip(f"needs {needed} of the extra `peers`")
    wrong = plant_subject(change_sources(bug.name, bug.changes), bug.system)
    result = shardproof.prove(bug.case, wrong, engine)
    found = contradicted(result)
    assert found == {bug.kills} if bug.alone else found & {*bug.kills.split("|")}, found
    if bug.phase:  # without one the bug is in nothing that is trained, such as an export
        phase, module = place(result.diagnosis) or ("", "")
        assert phase in bug.phase.split("|") and bug.region in {"", module}, (phase, module)
