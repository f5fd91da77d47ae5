"""Qwen3 of Hugging Face transformers under the library's own tp plan, and what transformers 5.23 gets wrong there.

With two micro-batches it sums the gradients of q_norm and k_norm over tp once more at every backward:

shardproof run "tp=2 micro=2" --subject shardproof.suites.subjects.qwen3:accumulating
"""

from shardproof.suites.subjects import hf


def subject(case, device):
    return hf.subject(case, device)


def accumulating(case, device):
    return hf.subject(case, device)


subject.truth = accumulating.truth = hf.truth
subject.words = accumulating.words = {**hf.subject.words, "kind": "qwen3", "micro": 1}
subject.cases, accumulating.cases = ("tp=2",), ("tp=2 micro=2",)
subject.refuses = lambda case: (
    "is split over tp alone"
    if case.world_size > case.tp
    else "transformers 5.23 accumulates the gradients of q_norm and k_norm wrongly"
    if case.micro > 1
    else ""
)
