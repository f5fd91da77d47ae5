"""The labelled lines of a failure as text: written, read again, completed by `when:`."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import replace

from shardproof.harness.checking.evidence import FAIL, Verdict
from shardproof.harness.ledger import PHASES
from shardproof.harness.protocols import CaseLike, case_text

LAUNCHED = "torchrun --nproc-per-node {} -m shardproof"
"""Words in the place of `shardproof` where every rank is launched."""
_PLACE = re.compile(rf"({'|'.join(PHASES)})( of \S+?)?(?=:? in step|: )")
_NUMBER = re.compile(r"(?<![a-z])\d+")
NO_OUTCOME = "nothing to compare: there is no outcome"
NO_CAUSE = "none of the known patterns fits"


def repeat_command(case: CaseLike, subject: str, options: str = "") -> str:
    """The one command that runs this case on this subject again."""
    text = case_text(case)
    quoted = shlex.quote(text) if any(sign in text for sign in '"$`\\!') else f'"{text}"'
    program = LAUNCHED.format(case.world_size) if "--engine torchrun" in options else "shardproof"
    return f"{program} run {quoted} --subject {shlex.quote(subject)} {options}".rstrip()


def with_when(verdict: Verdict, words: str) -> Verdict:
    """A failed verdict with the line `when:` before the one that repeats it; any other as it is."""
    before, repeat, after = verdict.message.partition("\nrepeat: ")
    if verdict.verdict != FAIL or not repeat:
        return verdict
    return replace(verdict, message=f"{before}\n{written({'when': words})}{repeat}{after}")


def written(lines: Mapping[str, str]) -> str:
    """The labelled lines as one text."""
    return "\n".join(f"{label + ':':8}{' '.join(text.split())}" for label, text in lines.items())


def site(message: str) -> str:
    """Common words of failures of one bug: phase and module of the line "first", layers as one; else the line "what".

    "backward of layers.3.mlp.w1 in step 0: act_grad/..." is "backward of layers.*.mlp.w1". Numbers are left out of
    what has no such place (a subject that raised).
    """
    found = _PLACE.match(line_of(message, "first"))
    return _NUMBER.sub("*", found.group() if found else line_of(message, "what") or message)


def line_of(message: str, label: str) -> str:
    """The text of one line of a failure by its label, "" where there is none."""
    lines = (line.partition(":") for line in message.splitlines())
    return next((text.strip() for name, _, text in lines if name == label), "")
