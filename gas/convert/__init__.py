"""Conversion of ordinary modules into models with histories.

:mod:`.scalable` begins, and :mod:`.conversion` goes through the steps:

1. :mod:`.module` finds the arguments of a module, and what it keeps and changes when it is run.
2. :mod:`.tracing` traces it in training and evaluation, with the stand-ins of :mod:`.values`.
3. :mod:`.rewriting` moves what depends on edges alone to the whole graph, makes layers of messages
   that the module passes by itself, and places histories.
4. :mod:`.check` compares layers on mini-batches with the whole of a small graph, of :mod:`.sample`.
5. :mod:`.model` is the result.
"""

from gas.convert.model import Converted
from gas.convert.scalable import to_scalable

__all__ = ["Converted", "to_scalable"]
