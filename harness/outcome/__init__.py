"""What a subject returned: the values of one rank as blocks of full tensors, and those of all ranks merged."""
