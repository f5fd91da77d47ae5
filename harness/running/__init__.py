"""From a case to its verdicts, and from many cases to a run folder: runs, evidence, judgement, storage."""
