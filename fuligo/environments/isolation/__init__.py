"""Environments in processes of their own: one that blocks, crashes or exits fails its sample and holds up no other.

The run (`factory`, `environment`, `workers`) starts one process that imports the environment's module (`spawner`) and forks a process for
each episode in progress (`worker`), which later episodes reuse. Calls and their results are messages on a socket (`messages`).
"""
