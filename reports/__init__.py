"""Shows runs; it computes nothing itself.

commands    the command line, a file a command     options     what its options request
stored      run folders as files and frames        printing    tables of text
comparing   two runs side by side                  predicting  memory and bytes of cases of any size
pages       the HTML page and its drawings         programs    recorded programs
"""
