"""Context parallelism: ranks divide every sequence among themselves, and layers do not notice.

    context = Context(group)                         # on every rank of a process group
    out, target = context.call(model, tokens)        # training, of the pieces of this rank
    out = context.prefill(model, tokens, memory)     # a prompt: the same memory and output on all ranks

A model is given a memory with stores that exchange (``gsm.context.pieces``). To leave context parallelism out, delete
this folder: ``gsm.training.distributed.sharded`` imports it only for ``trainer.context`` above 1.
"""

from gsm.context.calls import Context

__all__ = ["Context"]
