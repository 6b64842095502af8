"""Describes a layout: ranks as an array with named axes, and which slice of each parameter a rank holds.

Pure arithmetic: no array is touched and nothing communicates.
"""
