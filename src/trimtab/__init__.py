"""trimtab: stable post-training of language models by small, well-placed corrections.

Importing the package loads nothing heavy; take what you need from its rooms, for example
``from trimtab.objectives import groups``.
"""

__version__ = "0.1.0"
