"""Parts of the recorder: modules, backward and callers watched from outside, and where a call belongs."""
