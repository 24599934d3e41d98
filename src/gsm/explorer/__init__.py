"""The state explorer: one HTML file that shows, for every token of a text, what a trained GSM does there.

    facts       what is computed: one recorded forward, rollout, and the losses without the state and without stages
    words       what the tokens are called: pieces of text, keys and values of a task
    page        the file: facts packed into it, beside ``page.html.jinja``, ``page.css`` and the scripts
    command     ``python explore.py``

The file needs no network and allows none, and nothing that a text, a tokenizer or a checkpoint says is run in it.
"""

from gsm.explorer.page import Page, explore

__all__ = ["Page", "explore"]
