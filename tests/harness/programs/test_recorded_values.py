"""Values of a training script recorded as it is: what every rank held is there, by name and place, and changes nothing.

Truth is the same script on one rank: the parts that ranks recorded, put together, are its tensors. Scripts but
for the kinds fsdp1 and narrow train in float64, so that sums in another order differ by 1e-12.
"""

import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from shardproof.harness.errors import RequestError
from shardproof.harness.programs.session import values_of
from shardproof.harness.programs.tensors.layouts import split_of_master, split_value
from shardproof.harness.programs.values import KINDS, RankValues, ValueRow, read_values
from tests.harness.programs.launched import LIMIT_S, forked, ran

pytest.importorskip("safetensors", reason="needs safetensors")

SCRIPT = Path(__file__).with_name("valued.py")
TIED, UNTIED = "plain", "checkpoint"
TRUTHS = {"ddp": TIED, "fsdp1": UNTIED, "fsdp1-flat": UNTIED, "fsdp2": UNTIED, "tp": UNTIED}
ALONE = ("plain", "frozen", "checkpoint", "reentrant", "criterion", "closure", "parts")
Ranks = tuple[RankValues, ...]


class Launches:
    """Recorded launches of the script, each made once; `out` is what ranks printed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out: dict[str, list[str]] = {}
        self._ranks: dict[str, Ranks] = {}

    def of(self, kind: str, *words: str, seed: int = 1) -> Ranks:
        """What all ranks recorded; `words` are options of recording."""
        key = " ".join([kind, *words])
        if key not in self._ranks:
            place = self.folder / str(len(self._ranks))
            self.out[key] = self.ended(place, kind, str(seed), record=["--values", *words])
            self._ranks[key] = read_values(place / "runs" / "latest")
        return self._ranks[key]

    def ended(self, place: Path, kind: str, *words: str, record: Sequence[str] | None = None) -> list[str]:
        """What the ranks of a launch have printed, which have ended well."""
        place.mkdir()
        shutil.copy(SCRIPT, place)
        world = 2 if kind in TRUTHS else 1
        ranks = forked(place, SCRIPT.name, kind, *words, world=world, record=record)
        assert [rank.ended(LIMIT_S) for rank in ranks] == [0] * world, ranks[0].err
        assert not any("no more values" in rank.err for rank in ranks), ranks[0].err
        return [rank.out for rank in ranks]


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    return Launches(tmp_path_factory.mktemp("values"))


def rows(ranks: Sequence[RankValues], kind: str, name: str, step: int = 0) -> Iterator[tuple[RankValues, ValueRow]]:
    for rank in ranks:
        for row in rank.rows:
            if (row.kind, row.name, row.step) == (kind, name, step):
                yield rank, row


def whole(ranks: Sequence[RankValues], kind: str, name: str, leaf: str = "", step: int = 0) -> torch.Tensor:
    """The full tensor of the parts that say where they lie, or the one that all ranks have."""
    found = [(rank.tensor(row), row) for rank, row in rows(ranks, kind, name, step) if row.leaf == leaf]
    first, row = found[0]
    if row.global_shape is None:
        assert all(torch.equal(first, other) for other, _row in found)
        return first
    full = torch.full(row.global_shape, torch.nan, dtype=first.dtype)
    for tensor, row in found:
        assert row.offsets is not None
        full[tuple(slice(o, o + n) for o, n in zip(row.offsets, tensor.shape, strict=True))] = tensor
    return full


def names(ranks: Sequence[RankValues], kind: str) -> list[str]:
    return list(dict.fromkeys(row.name for rank in ranks for row in rank.rows if row.kind == kind))


@pytest.mark.parametrize("kind", [*TRUTHS, *ALONE])
def test_a_program_prints_the_same_and_its_steps_are_recorded(launches: Launches, kind: str) -> None:
    values = launches.of(kind)
    assert launches.ended(launches.folder / f"plain-{kind}", kind, "1") == launches.out[kind]
    assert all(rank.about["steps"] == [0, 1] and rank.about["done"] for rank in values)
    assert [rank.about["world_size"] for rank in values] == [len(values)] * len(values)
    for rank in values:
        assert [row.number for row in rank.rows] == [*range(len(rank.rows))]
        assert not any(row.left_out for row in rank.rows)


@pytest.mark.parametrize(("kind", "of"), TRUTHS.items())
def test_the_parts_of_all_ranks_are_the_tensors_of_one(launches: Launches, kind: str, of: str) -> None:
    values, truth = launches.of(kind), launches.of(of)
    clips = kind not in {"tp", "fsdp1-flat"}
    assert sorted(names(values, "param")) == sorted(names(truth, "param"))
    for sort in ("param", "grad", "grad_clipped", "param_after", "state_after")[: None if clips else 2]:
        for name in names(truth, sort):
            for step in (0, 1) if clips and sort != "param" else (0,):
                leaf = "exp_avg" if sort == "state_after" else ""
                seen, full = whole(values, sort, name, leaf, step), whole(truth, sort, name, leaf, step)
                assert_near(seen.reshape(full.shape), full, kind)
    if kind == "tp":
        assert_near(whole(values, "output", "up"), truth[0].tensor(last(truth, "output", "up")), kind)
        row = last(values, "output", "down")
        assert (row.pending, row.pending_axes, row.axes) == ("sum", ("tp",), (("tp", 2, 0),))
        return
    for rank in values:  # the micro-batch of a data-parallel rank is one of the rank alone
        for sort, factor in (("sample", 1), ("output", 1), ("output_grad", 2)):
            name = "args/0" if sort == "sample" else "up"
            ((_, mine),) = rows([rank], sort, name)
            (other,) = (row for _, row in rows(truth, sort, name) if row.call == rank.rank)
            assert_near(rank.tensor(mine), truth[0].tensor(other) * factor, kind)


def assert_near(seen: torch.Tensor, truth: torch.Tensor, kind: str) -> None:
    """Equal but for sums in another order."""
    rtol, atol = (2e-4, 1e-6) if kind == "fsdp1" else (1e-9, 1e-12)
    assert_close(seen.double(), truth.double(), rtol=rtol, atol=atol)


def last(ranks: Sequence[RankValues], kind: str, name: str) -> ValueRow:
    return [row for _, row in rows(ranks[:1], kind, name)][-1]


def test_computing_again_is_no_other_call_and_gives_the_gradients_that_forward_could_not(launches: Launches) -> None:
    plain, again = launches.of("checkpoint"), launches.of("reentrant")
    for name in ("up", "down", "head"):
        for sort in ("output", "output_grad"):
            found = [[(row.call, row.leaf) for _, row in rows(ranks, sort, name)] for ranks in (plain, again)]
            assert found == [[(0, ""), (1, "")]] * 2, (sort, name)
            pairs = zip(rows(plain, sort, name), rows(again, sort, name), strict=True)
            assert all(torch.equal(plain[0].tensor(one), again[0].tensor(other)) for (_, one), (_, other) in pairs)


def test_tied_frozen_clipped_and_what_is_outermost_beside_the_model(launches: Launches) -> None:
    (plain,), (frozen,), (beside,) = launches.of("plain"), launches.of("frozen"), launches.of("criterion")
    ((_, tied),) = rows([plain], "param", "head.weight")
    ((_, table),) = rows([plain], "param", "table.weight")
    assert (tied.alias_of, tied.key) == ("table.weight", table.key)
    for sort in ("grad", "param_after"):
        assert "table.weight" in names([plain], sort) and "table.weight" not in names([frozen], sort)
    ((_, norm),) = rows([plain], "norm", "")
    factor = 0.05 / (plain.tensor(norm) + 1e-6)
    assert_close(whole([plain], "grad_clipped", "up.weight"), whole([plain], "grad", "up.weight") * factor)
    assert {row.kind for row in plain.rows} == {*KINDS} - {"buffer"}
    for sort in ("output", "output_grad"):  # one tensor, which three calls returned in each micro-batch
        found = [row for name in ("down", "same") for _, row in rows([plain], sort, name)]
        assert sorted(row.call for row in found) == [0, 0, 1, 1, 2, 3]
        assert len({row.key for row in found}) == 2  # noqa: PLR2004
    assert names([beside], "output")[-1] == "CrossEntropyLoss"
    assert "CrossEntropyLoss:args/1" in names([beside], "sample")
    assert names(launches.of("closure"), "grad") == names(launches.of("checkpoint"), "grad")


def test_parts_of_a_model_that_is_not_called_itself_have_the_names_of_the_model(launches: Launches) -> None:
    parts, whole_model = launches.of("parts"), launches.of("checkpoint")
    for sort in ("param", "grad", "output_grad", "loss", "param_after"):
        assert sorted(names(parts, sort)) == sorted(name for name in names(whole_model, sort) if name or sort == "loss")
    assert names(parts, "sample")[0] == "table:args/0"
    assert_close(whole(parts, "grad", "up.weight"), whole(whole_model, "grad", "up.weight"))


def test_what_does_not_fit_into_the_budget_is_left_out_from_the_largest_on_and_named(launches: Launches) -> None:
    budget = 3000
    (small,), (every,) = launches.of("checkpoint", "--budget", str(budget / 2**30)), launches.of("checkpoint")
    assert [row.name for row in small.rows] == [row.name for row in every.rows]
    held = {row.key: small.tensor(row).nbytes for row in small.rows if row.key and not row.step}
    gone = [every.tensor(row).nbytes for row, mine in zip(every.rows, small.rows, strict=True) if mine.left_out]
    assert gone and budget / 2 < sum(held.values()) <= budget
    assert min(gone) >= max(held.values())
    assert {row.left_out for row in small.rows if not row.key} == {
        "does not fit into the budget of 3,000 bytes a step beside smaller ones"
    }


def test_float64_and_no_dropout_leave_nothing_narrow_and_nothing_drawn(launches: Launches) -> None:
    (plain,), (wide,) = launches.of("narrow"), launches.of("narrow", "--dtype", "float64", "--no-dropout")
    assert {row.dtype for row in plain.rows if row.kind == "param"} == {"bfloat16"}
    assert plain.about["drawn"] == [""]
    assert {row.dtype for row in wide.rows if row.kind not in ("sample", "state_after")} == {"float64"}
    assert wide.about["drawn"] == [] and "narrow" not in wide.about
    losses, counted = (sum(row.kind == "loss" for row in rank.rows) for rank in (plain, wide))
    assert counted == losses > 0


@pytest.mark.parametrize("kind", ["tp", "fsdp2"])
def test_the_same_initial_weights_are_cut_as_the_programs_own(launches: Launches, kind: str) -> None:
    truth = launches.of("checkpoint")
    values = launches.of(kind, "--same-init", str(truth[0].folder), seed=7)
    for name in names(truth, "param"):
        assert torch.equal(whole(values, "param", name), whole(truth, "param", name))
    assert values[0].about["same_init"] == {}
    assert_close(whole(values, "grad", "down.weight"), whole(truth, "grad", "down.weight"))


def test_a_perturbed_run_begins_alike_and_is_off_by_rounding_from_the_first_forward_on(launches: Launches) -> None:
    plain, moved = launches.of("checkpoint"), launches.of("checkpoint", "--perturb", "1")
    for sort, name in (("param", "up.weight"), ("sample", "args/0")):
        assert torch.equal(*(ranks[0].tensor(next(rows(ranks, sort, name))[1]) for ranks in (plain, moved)))
    for sort, name in (("output", "up"), ("output_grad", "up"), ("grad", "up.weight"), ("param_after", "up.weight")):
        one, other = (ranks[0].tensor(next(rows(ranks, sort, name))[1]) for ranks in (plain, moved))
        assert 0 < float((one - other).abs().max() / one.abs().max()) < 1e-12, (sort, name)


def test_a_program_of_one_rank_without_a_launcher_is_recorded_and_may_ask_for_torch_first(tmp_path: Path) -> None:
    shutil.copy(SCRIPT, tmp_path)
    asks = "import importlib.util, runpy\nassert importlib.util.find_spec('torch')\nrunpy.run_path('valued.py')\n"
    (tmp_path / "asking.py").write_text(asks)
    done = ran(tmp_path, sys.executable, "-m", "shardproof.record", "--values", "asking.py", "frozen", "1")
    assert done.returncode == 0, done.stderr
    (values,) = read_values(tmp_path / "runs" / "latest")
    assert values.about["steps"] == [0, 1]


def test_a_part_of_a_parameter_that_an_optimizer_holds_alone_is_a_piece_of_the_flattened_one() -> None:
    parameter = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4))
    part, copied = parameter.detach().view(-1)[5:9], parameter.detach().clone().view(-1)
    ((local, words, _),) = split_of_master(parameter, part, split_value)(part * 2)
    assert (words["stated_by"], words["global_shape"], words["offsets"]) == ("memory", (12,), (5,))
    assert local.tolist() == [10, 12, 14, 16]
    assert [one.local.shape for one in split_of_master(parameter, copied, split_value)(copied)] == [(3, 4)]
    assert split_of_master(parameter, copied[:5], split_value)(copied[:5])[0].words == {}  # a copy says no place


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"wanted": False, "budget": "1"}, "--budget: is about values, which are not recorded; legal: --values"),
        ({"wanted": False, "dropout": False}, "--no-dropout: is about values"),
        ({"dtype": "float32"}, "dtype=float32: must be float64"),
        ({"budget": "0"}, "budget=0: must be the GiB"),
        ({"perturb": "x"}, "perturb=x: must be a seed"),
        ({"same_init": "/nowhere"}, "same-init=/nowhere: holds no values"),
    ],
)
def test_wrong_words_about_values_are_one_sentence(words: dict[str, object], told: str) -> None:
    given = {"budget": None, "wanted": True, "dtype": None, "dropout": True, "same_init": None, "perturb": None}
    with pytest.raises(RequestError, match=told.replace("(", ".")):
        values_of(**given | words)  # type: ignore[arg-type]
