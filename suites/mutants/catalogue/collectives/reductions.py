"""Gradients of whole parameters that are never summed over ranks, summed twice, or kept equal by force (bugs.md 6a)."""

from __future__ import annotations

from suites.mutants.mutant import SPLIT, WHOLE, Change, Mutant, everywhere

__all__ = ["REDUCTIONS"]

_SEQUENCE = 'return module.rpartition(".")[2].endswith("norm") or (is_row(module) and leaf == "bias")'
_HEADS = 'return name.rpartition(".")[0].rpartition(".")[2] in ("q_norm", "k_norm")'
_WHOLE = 'return not _is_split(name.rpartition(".")[0])'
_CHOSEN = "partial = [gradient for name, gradient in gradients.items() if strategy.partial(rank.case, name)]"
_GROUPS = "for group in [partial] if strategy.coalesced else [[gradient] for gradient in partial]:"
_SUMMED = "sync.sum_gradients(group, weight_axis, op=strategy.partial_op)"

_HAVE_PARTIAL = everywhere("", (*SPLIT, "isp")) | everywhere("qk_norm=true", WHOLE)
"""Modes -> words with which they have partial gradients at all."""
_SYNCED = "backward|grad_sync"
_UNSUMMED = "not_summed|missing_call|wrong_payload"
_NORMS = "final_norm|layers.*.attention.?_norm"


def _sequence(new: str) -> Change:
    return Change(module="parallel.schemes.tensor", old=_SEQUENCE, new=new)


def _weights(new: str) -> Change:
    return Change(module="parallel.schemes.weight_parallel", old=_WHOLE, new=new)


REDUCTIONS = (
    Mutant(
        name="final-norm-not-summed",
        stands_for="B-01: Megatron #1446, the gradient of final_layernorm differs on every rank",
        modes=everywhere("", (*SPLIT, "isp")),
        changes=(
            _sequence(_SEQUENCE.replace("return ", 'return module != "final_norm" and (') + ")"),
            _weights(f'{_WHOLE} and not name.startswith("final_norm")'),
        ),
        kills="replicas",
        phase=_SYNCED,
        region="final_norm",
        cause=_UNSUMMED,
    ),
    Mutant(
        name="norms-not-summed",
        stands_for="B-04, B-06: InternEvo 1d7e2d0 and ColossalAI #4926, sequence parallelism without norm reductions",
        modes=everywhere("", (*SPLIT, "isp")),
        changes=(
            _sequence('return is_row(module) and leaf == "bias"'),
            _weights(f'{_WHOLE} and "norm" not in name'),
        ),
        kills="replicas",
        phase=_SYNCED,
        region=_NORMS,
        cause=_UNSUMMED,
    ),
    Mutant(
        name="norm-sync-behind-overlap-flag",
        stands_for="B-05: InternEvo 432bd5e, the norms' hook was attached only with overlapped gradients",
        modes=_HAVE_PARTIAL,
        condition="overlap=false",
        changes=(Change(module="parallel.training.step", old=_CHOSEN, new=_CHOSEN[:-1] + " and rank.case.overlap]"),),
        kills="replicas",
        phase=_SYNCED,
        region=_NORMS,
        cause=_UNSUMMED,
    ),
    Mutant(
        name="qk-norms-not-summed",
        stands_for="B-08: Megatron #7452-11, per-head norms are sums over heads and were not reduced",
        modes=everywhere("qk_norm=true"),
        changes=(
            Change(module="parallel.schemes.tensor", old=_HEADS, new="return False"),
            _sequence(_SEQUENCE.replace("return ", "return not module.endswith(('q_norm', 'k_norm')) and (") + ")"),
            _weights(f"{_WHOLE} and 'q_norm' not in name and 'k_norm' not in name"),
        ),
        kills="replicas",
        phase=_SYNCED,
        region="layers.*.attention.?_norm",
        cause=_UNSUMMED,
    ),
    Mutant(
        name="row-bias-not-summed",
        stands_for="B-16: BigScience #307, weights were kept in step and biases forgotten",
        modes=everywhere("", SPLIT),
        condition="bias=true",
        changes=(_sequence('return module.rpartition(".")[2].endswith("norm")'),),
        kills="replicas",
        phase=_SYNCED,
        region="layers.*.mlp.w2",
        cause=_UNSUMMED,
    ),
    Mutant(
        name="norm-bias-not-summed",
        stands_for="B-16: TE #441 and BigScience #272, the norms' weights were synchronised and their biases not",
        modes=everywhere("", (*SPLIT, "isp")),
        condition="norm=layernorm",
        changes=(
            _sequence(_SEQUENCE.replace(" or ", ' and leaf == "weight" or ')),
            _weights(f'{_WHOLE} and not name.endswith("norm.bias")'),
        ),
        kills="replicas",
        phase=_SYNCED,
        region="final_norm",
        cause=_UNSUMMED,
    ),
    Mutant(
        name="finalisation-skipped-after-the-first-step",
        stands_for="B-09: NeMo-RL #3716, another path through the step omits the finalisation of gradients",
        modes=_HAVE_PARTIAL,
        changes=(
            Change(
                module="parallel.training.step",
                old=_CHOSEN,
                new=f"{_CHOSEN}\n    partial = partial if rank.model.__dict__.setdefault('_steps', []) == [] else []\n"
                "    rank.model._steps.append(1)",
            ),
        ),
        kills="ledger",
        phase="grad_sync",
        region="",
        cause=_UNSUMMED,
    ),
    Mutant(
        name="positions-taken-for-split",
        stands_for="B-19: Megatron 1674ce30b8, replicated weights marked as split are not reduced; B-03, B-10 too",
        modes={"isp": "positions=learned"},
        changes=(_weights(f'{_WHOLE} and not name.startswith("embedding")'),),
        kills="replicas",
        phase=_SYNCED,
        region="embedding.positions",
        cause=_UNSUMMED,
    ),
    Mutant(
        name="redundant-gradients-summed",
        stands_for="B-17: NeMo Automodel #3822, equal gradients of redundant work are summed like disjoint ones",
        modes=everywhere("", WHOLE),
        changes=tuple(
            Change(
                module=f"parallel.schemes.{mode}",
                old="partial=tensor.head_partial",
                new="partial=tensor.sequence_partial",
            )
            for mode in WHOLE
        ),
        kills="parameter_gradients",
        phase=_SYNCED,
        region="final_norm",
        cause="summed_twice|extra_call|wrong_payload",
    ),
    Mutant(
        name="norms-summed-twice",
        stands_for="B-18: Megatron #1528, TE #1677, norm gradients reduced in backward and again at the end",
        modes=_HAVE_PARTIAL,
        changes=(
            Change(
                module="parallel.training.step",
                old=_GROUPS,
                new="for group in ([partial] if strategy.coalesced else [[gradient] for gradient in partial]) * 2:",
            ),
        ),
        kills="ledger",
        phase=_SYNCED,
        region=f"{_NORMS}|layers.*.mlp.w2",
        cause="summed_twice|extra_call",
    ),
    Mutant(
        name="copies-of-a-kv-head-not-summed",
        stands_for="B-13: torchtitan #1373, a key head shared by the ranks gets one rank's gradient",
        modes={"isp": "kv_heads<tp"},
        changes=(
            Change(
                module="parallel.layers.ulysses", old="copies.sum(_KV_HEADS + 1)", new="copies.select(_KV_HEADS + 1, 0)"
            ),
        ),
        kills="activation_gradients",
        phase="backward",
        region="layers.*.attention.*",
        cause="kv_alone",
    ),
    Mutant(
        name="replicas-kept-equal-by-averaging",
        stands_for="B-16: BLOOM averaged its layer norms, a work-around for a bug that nobody had found",
        modes=everywhere(),
        changes=(
            Change(
                module="parallel.training.step",
                old=_SUMMED,
                new=f"{_SUMMED}\n    for name, gradient in gradients.items():\n        if not rank.places[name].cuts:\n"
                "            gradient.copy_(sync.all_reduce(gradient, weight_axis, op='avg'))",
            ),
        ),
        kills="ledger",
        alone=True,
        phase="grad_sync",
        region="",
        cause="extra_call",
    ),
    Mutant(
        name="replicas-drift",
        stands_for="B-16: TE #441, replicas updated by slightly different gradients drift apart",
        modes=everywhere(),
        changes=(
            Change(
                module="parallel.training.loop",
                old="gradient.div_(tokens * shares)",
                new="gradient.div_(tokens * shares * (1 + 2**-48 * mesh.axis(strategy.weight_axis).rank))",
            ),
        ),
        kills="replicas",
        alone=True,
        phase=_SYNCED,
        region="final_norm|layers.*",
        cause="replicas_drift",
    ),
)
