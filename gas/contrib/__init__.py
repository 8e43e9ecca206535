"""Parts of the library that few programs need; nothing outside of this package imports them.

* :mod:`gas.contrib.dynamic`: graphs whose nodes and edges are added and removed.
* :mod:`gas.contrib.lightning`, or ``gas.lightning``: mini-batches for Lightning.
* :mod:`gas.contrib.rules`: training examples by feedback rules.
* :mod:`gas.contrib.simulation`: predicted time and memory of training on many machines.
* :mod:`gas.contrib.rocks`: features in a RocksDB, written while training.
"""
