"""Simulation of training on many machines: predicted time of an epoch, bytes and memory."""

from gas.contrib.simulation.machine import Machine
from gas.contrib.simulation.partition import PartitionStatistics, partition_statistics
from gas.contrib.simulation.simulator import Simulation, simulate

__all__ = [
    "Machine",
    "PartitionStatistics",
    "Simulation",
    "partition_statistics",
    "simulate",
]
