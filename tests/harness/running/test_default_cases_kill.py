"""The default cases kill bugs that show with one word only, and every known mutant finds a case that can show it."""

from __future__ import annotations

import pytest

from bugs.planting import planted
from harness.checking.checks import CHECKS, examine
from harness.checking.evidence import FAIL
from harness.engines.threads.inproc import InprocEngine
from harness.errors import RankRaised
from harness.running.proof import NEED_WATCHING
from harness.running.trials.runs import recorded
from harness.running.trials.trial import Trial
from harness.subject import named
from reference.case import Case
from reference.case.default_cases import default_cases
from suites.mutants.catalogue import HELD_BACK, MUTANTS, of_file
from suites.mutants.mutant import Mutant, holds

KNOWN = {mutant.name: mutant for mutant in (*MUTANTS, *HELD_BACK)}


KEYS_MISSED, RECOMPUTED = of_file("tests/one_word")
NEEDING_WORDS = (
    ("overlap=false", "tp-sp", KNOWN["norm-sync-behind-overlap-flag"]),
    ("fuse_qkv=false", "mtp", KEYS_MISSED),
    ("qk_norm=true", "tp", KNOWN["qk-norms-not-summed"]),
    ("clip>0", "fsp", KNOWN["clipped-by-own-norm"]),
    ("head=gather", "msp", KNOWN["gathered-logits-gradient-summed"]),
    ("head=local", "isp", KNOWN["loss-sent-back-once-a-rank"]),
    ("metric=true recompute!=none", "isp", RECOMPUTED),
)


@pytest.mark.parametrize(("words", "where", "mutant"), NEEDING_WORDS, ids=lambda value: getattr(value, "name", value))
def test_a_bug_that_needs_a_word_is_killed(words: str, where: str, mutant: Mutant) -> None:
    plain, *cases = default_cases([where])
    assert not holds(words, plain)
    shown = [case for case in cases if holds(words, case) and mutant.shows(case) and case.tp > case.pp]
    assert any(_failing(mutant, case) for case in shown)


def _failing(mutant: Mutant, case: Case) -> list[str]:
    """The checks that fail on one recorded run of this case."""
    with InprocEngine() as engine:
        try:
            evidence = recorded(Trial(case=case, subject=named(planted(mutant.sources())), engine=engine))
        except RankRaised:  # its own check of replicas
            return ["run"]
    asked = {name: check for name, check in CHECKS.items() if name not in NEED_WATCHING}
    return [name for name, finding in examine(evidence, asked).items() if finding.verdict == FAIL]


def test_every_known_mutant_finds_a_default_case_that_can_show_it() -> None:
    cases = default_cases()
    assert [name for name, mutant in KNOWN.items() if not any(map(mutant.shows, cases))] == []
