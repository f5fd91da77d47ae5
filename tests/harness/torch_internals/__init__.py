"""Names of torch that are private: each is tried, with what holds without it."""
