"""Runs ranks, records, annotates, compares; knows no model.

The files here are the words that every room uses; they import no room. A room imports only rooms below it:

    injecting, reproducing   every fault of a subject; a failure as a script
    programs                 unmodified training programs, recorded as they run
    running                  a case to its verdicts, many cases to a run folder
    diagnosing               why a check failed
    checking                 the checks, kind by kind, and what they look at
    witnesses, predicting    profilers that see the same events; memory and bytes at any size
    hangs                    after a hang: which ranks diverge, at which call
    recording                the collectives of a run, observed from outside, as a ledger
    subject                  what a subject provides: its program and its optional attributes
    engines                  how ranks run
    outcome                  what a subject returned: blocks of full tensors, merged
    torch_internals          the only private names of torch
"""
