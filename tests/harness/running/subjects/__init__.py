"""What a subject may be and do: names, modes, its own errors, other folders, kept processes."""
