"""The state explorer: one HTML file that shows the computation of a trained GSM at every token of a text.

    facts       computes the numbers: one recorded forward, rollout, and the losses without the state and without stages
    words       names the tokens: pieces of text, keys and values of a task
    page        writes the file from the facts, ``page.html.jinja``, ``page.css`` and the scripts
    command     ``python explore.py``

The file needs no network and allows none. No content of a text, a tokenizer or a checkpoint is executed in it.
"""

from gsm.explorer.page import Page, explore

__all__ = ["Page", "explore"]
