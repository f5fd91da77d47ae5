"""Random numbers of a rank: named streams, fields of coordinates, dropout, initial values (docs/randomness.md)."""
