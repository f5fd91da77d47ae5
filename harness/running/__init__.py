"""One case to its verdicts, and many cases to a run folder: runs, evidence, judgement, storage."""
