"""Conversion of ordinary modules into models with histories."""

from gas.convert.model import Converted
from gas.convert.scalable import to_scalable

__all__ = ["Converted", "to_scalable"]
