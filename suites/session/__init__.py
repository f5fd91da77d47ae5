"""A pytest session over one subject: its options, its prover, its gates, known failures and summary."""
