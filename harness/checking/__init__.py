"""The checks, kind by kind: numbers, bits and layouts, random numbers, the ledger, and the laws of any subject."""
