"""vLLM as a RolloutEngine, in processes of its own that run in an environment of their own.

`engine.py` is the engine, `process.py` a rank's hold on its process, `child/` what that process runs;
`environment.py` and `install.py` find and make the environment. Nothing here but `child/` imports vLLM or torch, whose
requirements exclude MindSpore's.
"""
