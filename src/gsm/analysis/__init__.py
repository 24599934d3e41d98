"""Eyes for researchers: what a trained model's state holds, where it comes from, and what breaks without it.

    rollout          which source positions reach each entry of the state, and by which way, from attention alone
    attribution      the same from gradients and from replaced tokens, and how well the three agree
    interventions    a model without some entries, bank slots or a stage's retrieval, inside a ``with`` block
    patching         which stage, slot and entry carries an answer, by parts of one call put into another
    needles          where needles lie, how many are answered by depth and length, and what breaks an answer
    probes           what a linear map can still read of a token so many positions back, with a shuffled control
    attention        where attention goes: over a text, over the state, how far back, and to sinks
    overlap          how much of what the stages select the encoder selects too
    state            what the shared state is like: its entries, their lengths, its effective rank
    figures          small functions that draw all of this on given axes
    drawing          the architecture as an SVG

Every function takes a model and tokens and gives tensors or small dataclasses; none needs Lightning or Hydra. What
stands here is used in the notebooks 02 to 08.
"""
