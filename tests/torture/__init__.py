"""Runs that are killed at every point of their life and resumed until done, and the proof that nothing is lost.

    python -m torture [--kills 200] [--real 30] [--family 10] [--seed 0]     (with tests/ on the path; or: make torture)

Processes, pipes, shared memory, ledger and files are the real ones. Run processes and engine processes are forked from
one process that has everything imported, so that a life takes a second instead of twenty; a last part leaves them to
the helper of the product, and kills it, too.
"""
