"""Words of every case, with or without features. No torch is loaded.

words   how a word of the case language is declared, read and written
core    `MODES`: how a model may be split; `Core`: the words of model, data and training, and what follows from them
groups  which ranks make a group: rank orders, layouts, pipelines
rules   which words are legal, alone and together
"""
