"""Imported last by the server that ranks are forked from: what is imported already is no garbage, so that a rank need not look through it
(.2 s a `gc.collect()`, and a copy of the pages that it touches)."""

import gc

gc.collect()
gc.freeze()
