"""A subject: its program on a rank, and its optional attributes, each read in one place.

    itself                  a callable, by its name or as it is         `resolve_subject`, `call_subject`
    words, cases, draws     cases in its own words, its default cases   `case_of`, `own_cases`, `draws`
    truth                   a dense model of its own, or a subject      `truth_of`
    session                 a context around its ranks and its truth    `session`
    modes, unchecked        what it claims and what it leaves out       `claims`, `claimed_modes`, `left_out`
    refuses                 cases that it does not support              `refusal`
    expected                its closed form of a case                   `state_terms`
    axes                    rank lists of its own rank order            `orders`, `named_axes`
    deviations              standard deviations of initial values       `deviations`
    per_rank                modules whose state is one set a rank       `kept_per_rank`
    compute_dtype, ...      lower dtypes in which it computes or sends  `lower_dtypes`
    deviates                tensors that deviate by design              `stated_deviations`
    activations, harmless, pipeline     read where they are used (`answer_question`, `ask_subject`, `offers`)

All of it is the subject's own code: whatever it raises, or leaves with, becomes one sentence (Unanswered). The harness
knows no modes: which there are is stated by the dense model. `harness.protocols.Subject` states the types.
"""

from shardproof.harness.subject.call import (
    NamedSubject,
    Unanswered,
    answer_question,
    ask_subject,
    call_subject,
    deviations,
    named_axes,
    offers,
    orders,
    resolve_subject,
    session,
    state_terms,
)
from shardproof.harness.subject.claims import (
    ClaimedModes,
    Deviation,
    case_of,
    cases_of,
    claimed_modes,
    claims,
    domains_of,
    draws,
    kept_per_rank,
    left_out,
    lower_dtypes,
    own_cases,
    stated_deviations,
    vocabulary,
)
from shardproof.harness.subject.truths import DenseFunction, OnRanks, compared_with, one_rank, refusal, truth_of

__all__ = [
    "ClaimedModes",
    "DenseFunction",
    "Deviation",
    "NamedSubject",
    "OnRanks",
    "Unanswered",
    "answer_question",
    "ask_subject",
    "call_subject",
    "case_of",
    "cases_of",
    "claimed_modes",
    "claims",
    "compared_with",
    "stated_deviations",
    "deviations",
    "domains_of",
    "draws",
    "kept_per_rank",
    "left_out",
    "lower_dtypes",
    "resolve_subject",
    "named_axes",
    "offers",
    "one_rank",
    "orders",
    "own_cases",
    "refusal",
    "session",
    "state_terms",
    "truth_of",
    "vocabulary",
]
