"""A run of a subject on all ranks of an engine: what each rank does in it, and whether this machine can hold it."""
