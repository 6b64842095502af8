"""Holds the verbs of the command line, a module each; train is in launch, report in watch.

`verbs.py` lists them and runs one. A verb parses and prints; the work is done in other packages.
"""
