"""Continuous batching: `Engine` connects the block manager, the state and a model.

`engine` has the public class; `loop` runs its steps: `scheduler` chooses the work and alone takes
blocks, `batching` makes arrays of it, `device` runs the compiled `steps`, and `outputs` reports the
tokens. `requests` has the records that all of them share.
"""
