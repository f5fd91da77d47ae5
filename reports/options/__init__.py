"""What the options of a command request, checked before torch or pandas is loaded."""
