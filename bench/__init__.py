"""plait.bench: every claim beside its best peer, interleaved in one run, as a ratio.

Not a general benchmark framework: a suite is data (cases, providers, formulas), measured by one timer, written as one
JSON file a run, shown as one table.
"""
