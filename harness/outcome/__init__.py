"""Outcomes of a subject: the values of one rank as blocks of full tensors, and those of all ranks merged."""
