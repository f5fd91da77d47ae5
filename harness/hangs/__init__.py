"""After a hang: what every rank did last, by our recorder, and where they parted."""
