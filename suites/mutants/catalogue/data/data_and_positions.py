"""The data path: which batch reaches a rank, labels, borders of sentences, positions (bugs.md 6e, 6i and 6j)."""

from __future__ import annotations

from suites.mutants.mutant import Change, Mutant, everywhere

__all__ = ["DATA_AND_POSITIONS"]

_READ = 'micro_batch(case, step, micro, mesh.axis("dp").rank)'
_OWN = "tokens, positions = (own_slice(x, sequence, dim=_SEQUENCE) for x in (batch.tokens, batch.positions))"
_ARRIVED = "parts = broadcast(flat, axis).split(lengths)"
_ROTATED = "q, k = rotate(q, table), rotate(k, table)"
_BORDERS = "hidden_pairs(batch.tokens.shape[1], batch.cu_seqlens, device) if packed else None"
_ATTENTION = "layers.0.attention*"


def _read(new: str) -> tuple[Change, ...]:
    return (Change(module="parallel.communication.batch", old=_READ, new=new),)


DATA_AND_POSITIONS = (
    Mutant(
        name="same-batch-on-every-data-rank",
        stands_for="B-66: Megatron #7452-4, samples 0 1 2 3 become 0 1 0 1",
        modes=everywhere(),
        condition="dp>1",
        changes=_read("micro_batch(case, step, micro, 0)"),
        kills="forward",
        phase="data|forward",
        region="|embedding",
        cause="data_rank_repeated",
    ),
    Mutant(
        name="same-batch-in-every-step",
        stands_for="B-85: NeMo #10847, an iterator that is made anew begins at the beginning",
        modes=everywhere(),
        changes=_read('micro_batch(case, 0, micro, mesh.axis("dp").rank)'),
        kills="forward",
        phase="data|forward|step",
        region="",
        cause="batch_repeated",
    ),
    Mutant(
        name="same-micro-batch-again",
        stands_for="B-85: frontier-bench #576, an iterator a chunk: micro-batches repeat",
        modes=everywhere(),
        changes=_read('micro_batch(case, step, 0, mesh.axis("dp").rank)'),
        kills="forward",
        phase="data|forward",
        region="",
        cause="micro_repeated",
    ),
    Mutant(
        name="flat-data-walked-with-another-stride",
        stands_for="B-67: the same buffer as in Megatron's broadcast_data, walked from another place",
        modes=everywhere("delivery=flat", ("tp", "tp-sp")),
        changes=(
            Change(
                module="parallel.communication.batch", old=_ARRIVED, new=_ARRIVED.replace(".split", ".roll(1).split")
            ),
        ),
        kills="forward|run",
        phase="data|forward",
        region="|embedding",
        cause="",
    ),
    Mutant(
        name="padding-learned",
        stands_for="B-110: InternEvo 20a2832, the labels of padding are 0 and not -100",
        modes=everywhere(),
        condition="family=internlm2 packed=false",
        changes=_read(_READ[:-1] + ", padding=0)"),
        kills="forward",
        phase="data|loss",
        region="",
        cause="padding_learned",
    ),
    Mutant(
        name="sentences-see-each-other",
        stands_for="B-62: Megatron #5243, borders of packed sentences ignored in attention",
        modes=everywhere(),
        condition="packed=true",
        changes=(Change(module="parallel.communication.batch", old=_BORDERS, new="None"),),
        kills="activations",
        phase="data|forward",
        region=_ATTENTION,
        cause="borders_ignored",
    ),
    Mutant(
        name="packed-positions-run-on",
        stands_for="B-62: Megatron d30e165203, positions do not restart with each packed sentence",
        modes=everywhere(),
        condition="packed=true",
        changes=(
            Change(
                module="parallel.communication.batch",
                old="positions=batch.positions.to(device),",
                new="positions=torch.arange(batch.tokens.shape[1], device=device)[None],",
            ),
        ),
        equivalent="Packs are legal with rotary positions only. A rotary score depends on the difference of two "
        "positions, and hidden_pairs lets a token see its own sentence only: running on adds the same number to both. "
        "What differs is rounding of angles, which are float64. That borders are kept is held by "
        "sentences-see-each-other.",
    ),
    Mutant(
        name="positions-restart-on-every-rank",
        stands_for="B-62: torchtitan #792, the table of positions is not cut with the sequence",
        modes={"isp": ""},
        changes=(
            Change(
                module="parallel.schemes.weight_parallel",
                old=_OWN,
                new="tokens = own_slice(batch.tokens, sequence, dim=_SEQUENCE)\n"
                "        positions = batch.positions[:, : tokens.shape[1]]",
            ),
        ),
        kills="activations",
        phase="data|forward",
        region=f"embedding|{_ATTENTION}",
        cause="positions_restart",
    ),
    Mutant(
        name="rotary-not-applied",
        stands_for="B-109: InternEvo 77c3b46, the fallback returned what its caller expected in place",
        modes=everywhere(),
        condition="positions=rope",
        changes=(Change(module="parallel.layers.attention", old=_ROTATED, new="rotate(q, table), rotate(k, table)"),),
        kills="activations",
        phase="forward",
        region=_ATTENTION,
        cause="positions_missing",
    ),
    Mutant(
        name="random-number-drawn-on-one-rank",
        stands_for="B-101: Megatron PR #206, the loader draws from the shared stream on one rank only",
        modes=everywhere(),
        changes=(
            Change(
                module="parallel.communication.batch",
                old="    match case.delivery:\n",
                new="    if mesh.axis('tp').rank == 0:\n        torch.rand(1)\n    match case.delivery:\n",
            ),
        ),
        equivalent="Nothing that follows draws from the shared stream: dropout=0 is the only legal value, weights, "
        "masks and sentences come from generators of their own (reference.model.parameters, reference.data.batches).",
    ),
    Mutant(
        name="recompute-keeps-no-random-state",
        stands_for="B-100, B-104: Megatron #1256, the wrong random state during recomputation",
        modes=everywhere(),
        changes=(
            Change(module="parallel.layers.recompute", old="preserve_rng_state=False", new="preserve_rng_state=True"),
        ),
        equivalent="As above: nothing draws, so which random state a recomputed layer begins with changes no number, "
        "and saving it issues no collective.",
    ),
    Mutant(
        name="labels-not-shifted",
        stands_for="modes.md 6.1: every token is its own label on the ranks, and in the dense model the next one is",
        modes=everywhere(),
        condition="delivery=local",
        changes=(
            Change(
                module="parallel.communication.batch",
                old="labels=batch.labels.to(device),",
                new="labels=batch.tokens.where(batch.labels >= 0, batch.labels).to(device),",
            ),
        ),
        kills="forward",
        phase="data|loss",
        region="",
        cause="labels_unshifted",
    ),
)
