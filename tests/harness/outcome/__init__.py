"""What a subject returned: its values as blocks, blocks merged."""
