"""The pool: ranks forked on this machine and kept from run to run."""
