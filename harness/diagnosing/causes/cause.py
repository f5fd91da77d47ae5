"""Likely causes: the stable ids that tables and tests rely on, each with the words of one failure.

An id says what kind of mistake numbers or ledger show; the words say it of this tensor, axis and group. A cause carries
what it predicts (`causes.proofs`), and cannot be made when the numbers contradict it. Hypotheses make one by `claimed`.
Sources: the mechanisms of the bugs that real systems had (bugs.md, section 6).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardproof.harness.dense_model import WhatIfLike
from shardproof.harness.diagnosing.causes.proofs import Proof, Seen

MEANT = "where it is meant, subject.compute_dtype or subject.wire_dtype states it"
"""Words behind a rounding."""

CAUSES: Mapping[str, str] = {
    # what a wrong tensor looks like
    "nan": "not a number or infinite",
    "zero": "zero throughout",
    "unused": "parameters without a gradient that do not move",
    "data_path": "data that are wrong in the dense model and on the ranks alike",
    "other_model": "a dense model that is another one in float32 than in float64",
    "stale": "the truth of another step",
    "summed_twice": "the group size, or its square, times the truth",
    "averaged": "the truth divided by the group size",
    "norm_counts_few": "a norm too small by a square root of the group size",
    "norm_counts_replicas": "a norm that counts something more than once",
    "sign": "minus the truth",
    "constant_factor": "a factor that belongs to no group size",
    "more_classes": "a loss whose softmax counts every class once a rank",
    "shifted_shard": "the shards of a group, shifted",
    "other_shard": "the shards of a group in another order",
    "rows_permuted": "the right rows in another order",
    "flat_dim": "an inner dim taken for flat memory",
    "bias_per_rank": "one vector too much in every row: added once a rank",
    "one_shard": "one shard is wrong, the others are right",
    "not_summed": "replicas that add up to the truth",
    "other_samples": "ranks and dense model that read other samples of a step",
    "not_averaged": "replicas whose mean is the truth",
    "transposed": "the right numbers with two dims exchanged",
    "bias_missing": "the truth without its bias",
    "micro_missing": "some micro-batches are not in the sum",
    "unequal_shares": "micro-batches that do not count once each",
    "local_count": "divided by tokens that were counted locally",
    "never_updated": "parameters as they were before the first step",
    "replicas_drift": "replicas that all are right, but not bit for bit the same",
    "norm_of_norms": "norms of parts that were added up instead of their squares",
    "not_zeroed": "an update that holds the first step's gradient once more",
    "flat_offset": "flat memory that is read some elements too early or too late",
    "scaled_down": "updates that are next to nothing, in the right direction",
    "term_missing": "a sum without one of its terms",
    "shorter_dtype": "the truth, rounded to a shorter dtype on its way",
    "norm_kind": "another norm than the root of the sum of squares",
    "norm_after_clip": "the norm that is left after clipping in place of the one before",
    "moments_reset": "moments of an optimizer that begin anew in a later step",
    "other_beta": "a moment that keeps another share of its past",
    "other_epsilon": "a denominator with another epsilon: a norm's or an optimizer's",
    "bias_correction": "moments that are corrected for another number of steps",
    "momentum_added": "an update that holds earlier updates once more, where there is no momentum",
    "decay_added": "weight decay where there is none, or more of it",
    "decay_in_gradient": "weight decay that is added to the gradient and goes through the moments",
    "unclipped": "updates without clipping",
    "clip_scales_up": "updates whose norm is scaled up to the limit",
    "step_missing": "states before the last step",
    "decay_missing": "updates without weight decay",
    "clipped_otherwise": "clipping by another rule: every element, tensor or rank by a limit of its own",
    "loss_by_parts": "right logits whose loss each rank takes of its own part",
    # what masks of dropout show
    "one_stream": "ranks that hold different shards and drop by one mask",
    "own_streams": "replicas that drop by independent masks",
    "drawn_anew": "recomputation that drops by another mask than its forward",
    "other_numbers": "numbers drawn in forward, dropout apart, that the truth does not draw",
    # where the ledger parts from the expectation
    "missing_call": "an expected call is left out",
    "extra_call": "a call too many",
    "wrong_group": "the right call over other ranks",
    "wrong_op": "another collective or another reduction",
    "wrong_payload": "the right call with more or fewer bytes, or another dtype",
    "wrong_place": "the right call in another phase or module",
    # where witnesses part
    "witness_slip": "one witness alone tells an event otherwise than the others",
    "recorder_blind": "others who do not know each other contradict the recorder",
    "session_differs": "ranks on processes of their own issue other calls than those that were proved",
    "not_stated": "calls that were seen and that the closed form does not state, or the other way round",
    # what a check says by itself
    "exposed": "an asynchronous call that is waited for before anything was computed",
    "not_waited": "an asynchronous call that nothing waits for",
    "not_parallel": "ranks of a case that splits that send nothing, or hold everything",
    "not_deterministic": "two runs of one case differ",
    "recording": "a run differs because it is watched",
    "other_dtype": "numbers of another kind than the dense model's, or not the same on all ranks",
    "other_shape": "a full shape that is not the dense model's",
    "part_as_whole": "one rank's part of a tensor told as the full one",
    "layout": "shards that leave a gap or have another shape",
    "uncheckable": "no name that the truth knows",
    # how a run ended without an outcome
    "raised": "the subject raised",
    "crashed": "the subject ended the process of a rank",
    "stalled": "a rank did not come to its next call in time",
    "desynchronised": "ranks issued different calls",
    "shared_state": "ranks that are threads share the state of modules: the case passes on processes",
    "machine": "the machine failed or the time was up",
}
"""Id -> what it stands for, whatever the tensor. Rules of the dense model that are not kept have their own ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A likely cause of a failure. Raises ValueError for a cause that its `proof` does not bear out, or without one.

    `follows`: sizes of the case that a factor equals: a case with another one would show whether it comes from them.
    """

    id: str
    words: str
    proof: tuple[Proof, ...] = field(repr=False, compare=False)
    follows: tuple[str, ...] = ()

    @property
    def explains(self) -> frozenset[str]:
        """The tensors that its proofs account for."""
        return frozenset(name for proof in self.proof for name in proof.names)

    @property
    def fitted(self) -> int:
        """How many numbers its proofs take from the wrong tensors."""
        return sum(proof.fitted for proof in self.proof)

    def __post_init__(self) -> None:
        if not self.proof or not all(proof.holds for proof in self.proof):
            raise ValueError(f"cause id={self.id}: {self.words!r} must hold of the numbers that it speaks of")


def claimed(id: str, words: str, *proof: Proof, follows: tuple[str, ...] = ()) -> list[Cause]:
    """The cause of this id, when its predictions hold; nothing when the numbers contradict it."""
    _check(id)
    if not proof or not all(one.holds for one in proof):
        return []
    return [Cause(id=id, words=words, proof=proof, follows=follows)]


def reported(id: str, words: str, what: object) -> Cause:
    """The cause of this id that something else than numbers shows: a call, a flaw, a finding, an exception."""
    _check(id)
    return Cause(id=id, words=words, proof=(Seen(what=what),))


def of_rule(rule: WhatIfLike, words: str, proof: Proof) -> list[Cause]:
    """The cause that a rule of the dense model is not kept, when its prediction holds."""
    return [Cause(id=rule.id, words=words, proof=(proof,))] if proof.holds else []


def _check(id: str) -> None:
    """Raise ValueError for an id that is in no table."""
    if id not in CAUSES:
        raise ValueError(f"cause id={id}: is not a known cause; legal: {' '.join(CAUSES)}")
