"""What truth and ranks read alike: packing, batches, tokenization (bugs.md 6e and 6j).

A bug here is planted in the dense model and in the ranks, as it would be: both move together, and no comparison of
the two can show it. What the reference states about its data beside that code must.
"""

from __future__ import annotations

from suites.mutants.mutant import Change, Mutant, everywhere

__all__ = ["SHARED_DATA"]

_LARGE = {"seq": 48, "batch": 3}
"""Words that leave room for every edge of a shard in the first step."""
_NUMBER = "at, number = steps_before(case) + step, micro * case.dp + dp_rank"
_EDGES = "edges = shard_edges(case) if not case.data else ()"


def _shared(
    name: str,
    stands_for: str,
    module: str,
    old: str,
    new: str,
    *,
    condition: str = "",
    large: bool = False,
    alone: bool = False,
) -> Mutant:
    return Mutant(
        name=name,
        stands_for=stands_for,
        modes=everywhere(),
        condition=condition,
        suite=_LARGE if large else {},
        changes=(Change(module=f"reference.data.{module}", old=old, new=new),),
        kills="data",
        alone=alone,
        phase="data",
        region="",
        cause="data_path",
    )


SHARED_DATA = (
    _shared(
        "labels-cross-sentences",
        "modes.md 6.1: the last token of a sentence learns the first of the next one",
        "packing",
        "    labels[torch.tensor(ends, device=tokens.device) - 1] = IGNORED\n",
        "",
        condition="packed=true",
        alone=True,
    ),
    _shared(
        "padding-learned-by-all",
        "B-110: InternEvo 20a2832, the labels of padding are 0 and not -100",
        "batches",
        "return _Rows(tokens=data.input_ids, labels=labels,",
        "return _Rows(tokens=data.input_ids, labels=labels.clamp(min=0),",
        condition="family=internlm2 packed=false",
    ),
    _shared(
        "sentences-learn-themselves",
        "modes.md 6.1: labels are not shifted against the tokens of their sentence",
        "packing",
        "return torch.cat((tokens[1:], tokens.new_full(",
        "return torch.cat((tokens[:-1], tokens.new_full(",
    ),
    _shared(
        "rows-learn-themselves",
        "modes.md 6.1: labels of full rows are not shifted against their tokens",
        "batches",
        "labels=window[:, 1:], positions",
        "labels=window[:, :-1], positions",
        condition="family=gpt packed=false",
    ),
    _shared(
        "pack-positions-run-on",
        "B-62: Megatron d30e165203, positions do not restart with each packed sentence",
        "packing",
        "indexes = torch.arange(packed_length, device=tokens.device) - starts",
        "indexes = torch.arange(packed_length, device=tokens.device) - starts * 0",
    ),
    _shared(
        "long-sentences-not-cut",
        "modes.md 6.1: a sentence longer than SEQ_LEN stays one sub-sequence of a pack",
        "packing",
        "borders += [*range(borders[-1] + seq_len, edge, seq_len), edge]",
        "borders += [edge]",
    ),
    _shared(
        "data-ranks-read-alike",
        "B-66: Megatron #7452-4, samples 0 1 2 3 become 0 1 0 1",
        "batches",
        _NUMBER,
        _NUMBER.replace(" + dp_rank", ""),
        condition="dp>1",
    ),
    _shared(
        "steps-read-alike",
        "B-85: NeMo #10847, an iterator that is made anew begins at the beginning",
        "batches",
        "    number += step * case.micro * case.dp\n",
        "",
    ),
    _shared(
        "short-corpus-read-alike",
        "B-85: the second lap through a short corpus gives the batches of the first",
        "stream",
        " + number // places",
        "",
    ),
    _shared(
        "documents-run-together",
        "modes.md 6.1: the end of a document is no end of a sentence",
        "stream",
        '    is_end[torch.tensor(text.lengths, device="cpu").cumsum(0) - 1] = True\n',
        "",
    ),
    _shared(
        "documents-in-another-order",
        "tokens of the documents in another order than their lengths",
        "corpus",
        "return Tokens(ids=torch.cat(kept),",
        "return Tokens(ids=torch.cat(kept[::-1]),",
    ),
    _shared(
        "end-of-document-is-a-byte",
        "modes.md 6.1: the id that ends a document is one that text has too",
        "readers",
        "    ids[-1] = END\n",
        "    ids[-1] = 10\n",
    ),
    _shared(
        "prompts-learned",
        "EVO collaters.py: negative ids mark prompts, whose labels are learned all the same",
        "packing",
        "labels = torch.where(raw >= (0",
        "labels = torch.where(raw.where(raw == IGNORED, raw.abs()) >= (0",
    ),
    _shared(
        "token-0-not-learned",
        "EVO collaters.py: a real token 0 is taken for padding",
        "packing",
        '0 if zero == "learn" else 1',
        '1 if zero == "learn" else 0',
    ),
    _shared(
        "every-micro-batch-counts-alike",
        "torchtitan #2206 and its kin: with equal counts a mean of means is right, and its bug is hidden",
        "batches",
        "return most - number * max(1, most // (case.micro * case.dp)) % most",
        "return most // 2 + 1",
        condition="family=gpt packed=false",
        large=True,
    ),
    _shared(
        "no-shard-edge-in-the-data",
        "B-76: text never meets the rows at which a wrong range shows",
        "batches",
        _EDGES,
        "edges = ()",
        large=True,
    ),
    _shared(
        "shard-edges-one-row-off",
        "B-76: the row beside the last one of a shard in its place",
        "edges",
        "min(first + size, vocab) - 1)]",
        "min(first + size, vocab) - 2)]",
        large=True,
    ),
    _shared(
        "shard-edges-masked",
        "B-76: the rows at which a wrong range shows are labels that do not count",
        "batches",
        ".index_fill(0, counted, -1.0)",
        ".index_fill(0, counted, 9e9)",
        large=True,
    ),
)
