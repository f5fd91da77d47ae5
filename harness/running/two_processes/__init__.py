"""Cases shared between two processes: who proves which, and the process beside this one."""
