"""Shows runs; it computes nothing itself.

commands    the command line, a file a command     options     what its options request
stored      run folders as files and frames        printing    tables of text
comparing   two runs side by side                  predicting  layouts on a cluster that is not here
pages       the HTML page and its drawings         programs    recorded programs
"""
