"""Checkpoints: the state of a run on disk, complete or absent, which any layout can load.

Entry points: `save.Saver`, `load.load_role`, `folders.find` (from where a run resumes), `differences.check` (whether it
is still the same run), `format.Manifest` (what is stored). When a run saves is decided in `run`; model files, with
weights alone, are read and written in `weights`.
"""
