"""Memory and bytes of cases of any size, by dry runs and closed forms."""
