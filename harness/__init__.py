"""Runs ranks, records, annotates, compares; knows no model.

The modules here are used by all packages in this folder, and import none. A package imports only those below it:

    parity                   two launches of one program, compared by recorded values
    programs, reproducing    unmodified training programs, recorded as they run; a failure as a script
    running                  a case to its verdicts, many cases to a run folder, every fault of a subject
    diagnosing               why a check failed
    checking                 the checks, kind by kind, and what they look at
    witnesses, predicting    profilers that see the same events; memory and bytes at any size
    recording, traces        the collectives of a run, observed from outside, as a ledger; traces of other jobs, hangs
    subject                  what a subject provides: its program and its optional attributes
    engines                  how ranks run
    outcome                  what a subject returned: blocks of full tensors, merged
    torch_internals          the only private names of torch
    verdicts                 verdicts and failed checks as records, and their sentences
"""
