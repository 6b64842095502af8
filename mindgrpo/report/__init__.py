"""Reads a run's folder and writes it as one HTML page that needs no network: report.html.

It contains the reader, which accepts incomplete and older folders, the choice of samples, and the page's sources. run/
and monitor/ decide what a run records; nothing here computes a metric of training.
"""
