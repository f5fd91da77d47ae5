"""Property-based suites that any subject can answer, the bugs planted in ours, and subjects to start from.

drawing    cases to draw                    session    one pytest session over one subject
killing    which check notices which bug    mutants    the bugs planted in our own source
subjects   tutorials, one file each
"""
