"""Holds the verbs of the command line, a module each; train is beside launch, report beside watch.

`verbs.py` lists them and runs one. What a verb does to a run lives in the rooms below; a verb parses and prints.
"""
