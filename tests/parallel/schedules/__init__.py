"""Pipeline schedules: laws over thousands of shapes, planted bugs, torch's and Megatron-Core's own orders."""
