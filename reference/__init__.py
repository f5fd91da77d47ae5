"""The truth: dense, single process, torch only.

case       one experiment in words (no torch)          language     the words of every case, groups of ranks (no torch)
data       files to micro-batches                      model        the dense decoder
training   its steps, the control run, its rounding, step 0 taken apart
dense_model  all of it as one object, for whoever proves against it
errors     the error of a case that cannot be          checkpoints  what a case may begin with, of any system
"""
