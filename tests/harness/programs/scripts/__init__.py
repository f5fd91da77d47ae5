"""Programs of others that are recorded: each is written as its library's readers write it, and prints its losses."""
