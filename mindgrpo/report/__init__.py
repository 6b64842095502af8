"""Reads a run's folder and writes what it holds as one HTML page that needs no network: report.html.

Here are the reader, which takes half-written and older folders as they are, the choice of the samples shown, and the
page's sources. What a run records is decided in run/ and monitor/, and nothing here computes a figure of training.
"""
