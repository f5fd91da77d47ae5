"""Campaigns and measurements of the product itself; none of it is shipped."""
