"""Causes that need no word of the decoder: bugs planted in the small MLP of `suites.subjects.mlp`, and neighbours."""

from pathlib import Path
from typing import Any

import pytest

from shardproof.harness.diagnosing.diagnosis import Diagnosis
from shardproof.harness.running.locating.beginnings import _apart
from shardproof.harness.verdicts.facts import First
from shardproof.suites.subjects import mlp
from tests.harness.proofs import proved

SOURCE = Path(mlp.__file__).read_text(encoding="utf-8")
SUMS = "for tensor in (total, *(weight.grad for weight in model.parameters())) if group else ():"
SUM = "dist.all_reduce(tensor, group=group)"
PART = "/ (case.micro * case.dp)"
ENDED = '    return outcome | {f"param/{name}"'
NORM = "torch.stack([w.grad.square().sum() for w in model.parameters()]).sum().sqrt()"
OWN_DATA = '[mesh.get_local_rank("dp")]'
MODEL = "    model, rows = dense(case), case.inner // case.tp"
CUT = '    first = mesh.get_local_rank("tp") * rows'
RETURNED = '    for kind in ("grad", "param"):'
MADE = "    return outcome\n\n\nsubject.truth"


def velocity(held: str) -> dict[str, str]:
    """A kind of the subject's own: a copy of the gradient, of which ranks hold this in place of their part `own`.

    `parts` are those of all tp ranks, `tp` and `dp` the rank's places.
    """
    right = "    found = train(case, dense(case), range(case.dp))\n"
    right += '    return found | {"velocity/0.weight": found["grad/0.weight"]}'
    made = '    own, tp, dp = outcome["grad/0.weight"].local, mesh.get_local_rank("tp"), mesh.get_local_rank("dp")\n'
    made += "    parts = [torch.empty_like(own) for _ in range(case.tp)]\n"
    made += '    dist.all_gather(parts, own, group=mesh.get_group("tp"))\n'
    made += f'    outcome["velocity/0.weight"] = Shard({held}, (first, 0), (case.inner, case.width))\n'
    return {"    return train(case, dense(case), range(case.dp))": right, MADE: made + MADE}


def norm(value: str) -> dict[str, str]:
    """A norm of gradients that is returned as total_norm: the truth's in `truth`, this one on ranks."""
    right = "found = train(case, dense(case), range(case.dp))\n    "
    right += 'squares = [tensor.square().sum() for name, tensor in found.items() if name.startswith("grad/")]\n    '
    right += 'return found | {"total_norm": sum(squares).sqrt()}'
    return {"return train(case, dense(case), range(case.dp))": right, MADE: f"    {value}\n{MADE}"}


OWN_NORM = 'squares = [outcome[f"grad/{n}"].local.square().sum() for n in ("0.weight", "2.weight")]\n    '
SUMMED_NORM = OWN_NORM + 'squared = sum(squares)\n    dist.all_reduce(squared, group=mesh.get_group("tp"))\n    '
HALF_NORM = SUMMED_NORM + 'outcome["total_norm"] = 0.8 * squared.sqrt()'


def causes(changes: dict[str, str]) -> list[tuple[str, str]]:
    """Ids and words of the first failed check of the MLP with these lines changed."""
    return [(cause.id, cause.words) for cause in diagnosed(changes).causes]


def placed(changes: dict[str, str]) -> First:
    """The first place of the MLP with these lines changed."""
    return diagnosed(changes).first


def diagnosed(changes: dict[str, str], case: str = "tp=2 dp=2 micro=2") -> Diagnosis:
    source = SOURCE
    for old, new in changes.items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    scope: dict[str, Any] = {"__name__": "planted_mlp"}
    exec(compile(source, "planted_mlp.py", "exec"), scope)
    return next(one for one in proved(scope["subject"], case).diagnoses.values() if one)


@pytest.mark.parametrize(
    ("changes", "id", "words"),
    [
        (
            {SUMS: SUMS.replace("*(weight.grad for weight in model.parameters())", "")},
            "not_summed",
            "over the ranks of dp=2",
        ),
        ({PART: "/ (case.micro * len(dp_ranks))", SUMS: "for tensor in ():"}, "not_averaged", "never averaged over dp"),
        ({PART: "/ (case.micro * len(dp_ranks))"}, "size_factor", "2 is the size of dp"),
        (norm(OWN_NORM + 'outcome["total_norm"] = sum(squares).sqrt()'), "norm_members", "its own parts"),
        (
            {
                **norm('outcome["total_norm"] = outcome.pop("early")'),
                f"        {SUMS}": '        outcome |= {"early": '
                + NORM
                + "} if group and not step else {}\n        "
                + SUMS,
            },
            "norm_members",
            "before they are summed over ranks, on each rank",
        ),
        (
            {OWN_DATA: '[(mesh.get_local_rank("dp") + mesh.get_local_rank("tp")) % case.dp]'},
            "other_samples",
            "ranks 0 and 1 of one tp group ask for different samples",
        ),
        ({OWN_DATA: '[mesh.get_local_rank("dp") + 1]'}, "other_samples", "other samples than those of the truth"),
        ({"range(case.micro)": "range(case.micro - bool(group))"}, "other_samples", "micro-batch 1 were never asked"),
        (velocity("parts[tp - 1]"), "other_part", "shifted by 1 of 2 shards"),
        (velocity("parts[tp - 1] if dp else own"), "other_part", "rank 2 holds what lies at 12, where 0 is meant"),
        (
            {CUT: "    first = 0", RETURNED: f"{CUT}\n{RETURNED}"},
            "other_start",
            "rank 1 begins with the part of 0.weight that rank 0 returns",
        ),
        (
            {MODEL: MODEL.replace("dense(case)", 'dense(case.but(seed=mesh.get_local_rank("dp")))')},
            "other_start",
            "rank 2 begins with another 0.weight than the truth",
        ),
    ],
)
def test_a_bug_is_named_by_what_the_numbers_and_calls_show(changes: dict[str, str], id: str, words: str) -> None:
    found = causes(changes)
    assert [known for known, _ in found] == [id], found
    assert words in found[0][1]


@pytest.mark.parametrize(
    "changes",
    [
        {SUM: SUM + "\n            tensor *= 1 + 0.1 * dist.get_rank()"},  # neither terms nor a mean: ranks 0 to 3
        {SUM: SUM + "\n            tensor += 0.01 * dist.get_rank() * tensor.flip(0) if tensor.dim() else 0"},
        norm(HALF_NORM),
        velocity("own + 0.1 * parts[tp - 1]"),
        velocity("own.flip(0) * own if dp else own"),
    ],
)
def test_neighbours_of_these_bugs_get_no_such_cause(changes: dict[str, str]) -> None:
    assert causes(changes) == []


def test_samples_that_ranks_share_out_are_no_different_ones() -> None:
    shared = [{(0, 0, 5 * rank, 5 * rank + 5, 2)} for rank in range(4)]
    assert _apart(shared) is None
    apart = _apart([shared[0], shared[1], shared[1], shared[0]])
    assert apart and apart.text.startswith("ranks 0 and 1 of one tp group")


def test_samples_of_a_later_layout_are_those_of_its_own_groups() -> None:
    begun = [{(0, 0, 0, 5, 3)} for _ in range(6)]  # tp=3 dp=2, and tp=2 dp=3 behind a checkpoint
    then = [{(1, 0, 5 * (rank // 2), 5 * (rank // 2) + 5, 2)} for rank in range(6)]
    assert _apart([one | other for one, other in zip(begun, then, strict=True)]) is None
    then[1], then[2] = then[2], then[1]
    apart = _apart([one | other for one, other in zip(begun, then, strict=True)])
    assert apart and apart.text.startswith("ranks 0 and 1 of one tp group")
