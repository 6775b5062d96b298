"""Environments in separate processes: one that blocks, crashes or exits fails its own sample and does not delay others.

The run (`factory`, `workers`) starts one process that imports the environment's module (`spawner`) and forks a process for
each episode in progress (`worker`), which later episodes reuse. Calls and their results are messages on a socket (`messages`).
"""
