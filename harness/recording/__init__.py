"""What the recorder is made of: modules, backward and callers watched from outside, and where a call belongs."""
