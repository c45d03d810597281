"""Samples of a transformers model in a process of its own: `python -m tilewright.sampler`.

It proves that weights arrive, and runs a loop of rollouts on a laptop; transformers' continuous
batching generates. `engine.py` holds one set of weights at a time and draws tokens, `asked.py` is
what a request asks for, `app.py` has the routes.
"""
