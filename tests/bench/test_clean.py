"""The campaign that counts false alarms: shares, distinct valid cases, and that a wrong subject raises alarms."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from bench.clean import Part, campaign, cases_of, main
from parallel.subject import subject as right
from reference.case import Case
from reference.language.modes import MODES
from suites.drawing.sizes import HIDDEN, TOKENS, large
from suites.drawing.strategies import NOT_DRAWN, every_word
from suites.session.sampling import sampled


def wrong(case: Case, device: torch.device) -> Mapping[str, object]:
    """Ours, with the first loss a little too large."""
    outcome = dict(right(case, device))
    loss = outcome["loss/0"]
    assert isinstance(loss, Tensor)
    return outcome | {"loss/0": loss * (1 + 1e-6)}


def listening(case: Case, device: torch.device) -> Mapping[str, object]:
    """Refuses every case, and keeps its text."""
    raise AssertionError(case)


def _listen(case: Case) -> str:
    LISTENED.append(str(case))
    return "listens"


LISTENED: list[str] = []
setattr(listening, "modes", ("tp",))  # noqa: B010
setattr(listening, "refuses", _listen)  # noqa: B010
setattr(wrong, "modes", ("tp",))  # noqa: B010  (a function's attribute, as product.md asks of subjects)


def test_shares_of_all_parts_add_up() -> None:
    shares = [Part(cases=100, number=number, parts=3).shares() for number in (1, 2, 3)]
    assert sum(sum(share.values()) for share in shares) == 100
    assert all(set(share) == set(MODES) for share in shares)
    least = 100 // (3 * len(MODES))
    assert {count for share in shares for count in share.values()} == {least, least + 1}


def test_a_right_subject_is_quiet(tmp_path: Path) -> None:
    assert main(["--cases", "6", "--out", str(tmp_path)]) == 0
    (row,) = csv.DictReader((tmp_path / "clean-any-1-of-1.csv").read_text().splitlines())
    assert (row["cases"], row["refused"], row["alarms"]) == ("6", "0", "0")


def test_a_wrong_subject_is_not(tmp_path: Path) -> None:
    name = f"{__name__}:wrong"
    assert main(["--subject", name, "--cases", "2", "--dtype", "float64", "--steps", "1", "--out", str(tmp_path)]) == 1
    alarms = [json.loads(line) for line in (tmp_path / "alarms-float64-1-of-1.jsonl").read_text().splitlines()]
    assert {alarm["check"] for alarm in alarms} == {"forward"}
    assert len({alarm["case"] for alarm in alarms}) == 2


def test_parts_draw_different_cases() -> None:
    texts = []
    for number in (1, 2):
        LISTENED.clear()
        part = Part(subject=f"{__name__}:listening", cases=4, number=number, parts=2, dtype="float64", steps=1)
        assert [so_far.refused for so_far, _ in campaign(part)] == [2]
        texts.append(set(LISTENED))
    assert len(texts[0]) == len(texts[1]) == 2
    assert len(texts[0] | texts[1]) == 3  # the simplest case comes first whatever the seed


def test_every_fifth_case_is_at_a_size_that_users_train() -> None:
    drawn = [cases_of("tp", 6, Part(number=number, parts=5)) for number in range(1, 6)]
    last = [case for cases, many in zip(drawn, (1, 1, 1, 2, 1), strict=True) for case in cases[-many:]]
    assert (sum(map(len, drawn)), len(last)) == (30, 6)
    assert all(case.hidden >= 200 or case.seq * case.batch * case.micro * case.dp >= 700 for case in last)


def test_large_cases_have_up_to_16384_tokens_or_hidden_2048_in_every_dtype() -> None:
    drawn = sampled(st.sampled_from(tuple(MODES)).flatmap(large), 100, 2)
    tokens = [case.seq * case.batch * case.micro * case.dp for case in drawn]
    assert max(TOKENS) * 0.9 < max(tokens) <= max(TOKENS) == 16_384
    assert max(HIDDEN) * 0.9 < max(case.hidden for case in drawn) <= max(HIDDEN) == 2048
    assert {case.dtype for case in drawn} == {"float64", "float32", "bfloat16", "float16"}


@pytest.mark.parametrize("option", ["--part=0/2", "--part=x", "--cases=0", "--steps=-1"])
def test_a_wrong_request_is_one_line(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([option, "--out", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"bench.clean: {option.removeprefix('--')}") and told.count("\n") == 1


def test_every_word_of_the_case_language_is_drawn_or_left_out_for_a_reason() -> None:
    cases = [case for number, mode in enumerate(MODES) for case in sampled(every_word(mode), 90, number)]
    drawn = {field.name: {getattr(case, field.name) for case in cases} for field in fields(Case)}
    assert {word for word, values in drawn.items() if len(values) == 1} == set(NOT_DRAWN)
    for word, legal in Case.legal_words().items():
        assert word in NOT_DRAWN or drawn[word] == set(legal), word
    assert {1.0, 0.1} <= drawn["lr"] and {0.0, 1.0} <= drawn["clip"] and {1, 2, 3, 20} <= drawn["steps"]
