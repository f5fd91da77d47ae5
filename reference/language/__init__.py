"""Words of every case, with or without features. No torch is loaded.

words   how a word of the case language is declared, read and written
modes   `MODES`: how a model may be split, one entry for each value of `mode=`
core    `Core`: the words of model, data and training, and what follows from them
rules   which of these words are legal, alone and together
routers rules of the words about experts' choices and loads
"""
