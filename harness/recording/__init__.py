"""The recorder: modules, backward and callers observed from outside, and the place where each call belongs."""
