"""Continuous batching: `Engine` puts the block manager, the state and a model together.

`engine` is what users call; `scheduler` decides what a step computes and is the only one to take
blocks; `dispatch` makes batches of that and sends them off as the compiled `steps`; `outputs` says
what came of it; `requests` is what all of them talk about.
"""
