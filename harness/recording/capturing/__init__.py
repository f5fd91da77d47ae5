"""What modules return and what flows back into them, captured from outside."""
