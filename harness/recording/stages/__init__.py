"""What a pipeline rank does when: its forwards and backwards, and the calls that are under way meanwhile."""
