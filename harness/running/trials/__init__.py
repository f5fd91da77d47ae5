"""The runs of one case, from which its evidence is made: recorded, dry, split otherwise, and what rounding may do."""
