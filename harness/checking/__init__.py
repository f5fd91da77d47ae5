"""The checks, kind by kind: numbers, bits and layouts, the ledger, and the laws that hold for any subject."""
