"""Turns a user's rows into encoded prompts, in an order that is a function of the seed.

In the room: readers of data sets (sources.py opens one), chat templates, the tokenizer, the prompts of a run and their
sampler. Not in the room: what completions are worth (rewards/), and batches of tokens to train on (training/).
"""
