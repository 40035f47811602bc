"""Looks through checkpoints for state that is damaged, uninitialised or missing, and repairs copies of them.

``reading`` finds the tensors of a checkpoint, ``arrange`` says which slot of which table each one is,
``values`` and ``ids`` look at what they hold, ``report`` says what was found; ``repair`` writes the copy.
"""
