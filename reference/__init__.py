"""The truth: the dense model in one process.

case       one experiment in words (no torch)          language     the words of every case, groups of ranks (no torch)
data       files to micro-batches                      model        the dense decoder
training   its steps, the control run, what rounding may cause, the gradients of step 0 by micro-batch
dense_model  all of it as one object, for whoever proves against it
errors     the error of a case that cannot be          checkpoints  what a case may begin with, of any system
"""
