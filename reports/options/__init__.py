"""Options of a command and their requests, checked before torch or pandas is loaded."""
