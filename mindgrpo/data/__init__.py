"""Turns a user's rows into encoded prompts: readers of files, chat templates, tokenizer, order of the data.

`sources.py` opens a data set, `prompts.py` encodes it. Rows are dropped or cut only where configured.
"""
