"""Records whole programs: every rank of a training script writes its part of one run folder while it runs."""
