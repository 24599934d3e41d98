"""The state explorer: an HTML file that shows the computation of a trained GSM at every token of a text.

    facts       the numbers: a recorded forward pass, rollout, and the losses without the state and without stages
    words       the texts of tokens: pieces of text, keys and values of a task
    page        the file, from the facts, ``page.html.jinja``, ``page.css`` and the scripts
    command     ``python explore.py``

The file works offline, and its content security policy forbids requests. Content of a text, a tokenizer or a checkpoint
is never executed.
"""

from gsm.explorer.page import Page, explore

__all__ = ["Page", "explore"]
