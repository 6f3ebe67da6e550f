"""plait: trains large models on a dp x pp x tp grid and keeps the run alive.

Importing this loads nothing else: `plait.kernels`, `plait.parallel` and `plait.ckpt` can each be used alone.
"""

__version__ = "0.1.0"
