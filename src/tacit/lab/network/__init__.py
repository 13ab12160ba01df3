"""The network of a lab: namespaces, shaped links, what holds them, and the check that they are what was asked for.

`plan.py` decides what is built (pure values), `keeper.py` holds it, `wiring.py` builds it over netlink, `calibration.py` compares it
with `theory.py`; `lab.py` is the handle. Nothing here knows experiments.
"""
