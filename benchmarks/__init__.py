"""What Headrace costs, measured. ``python -m benchmarks [NAME ...] [--quick] [--json DIR]``.

``--against CHECKOUT`` compares two checkouts: each case runs in both alternately, the table shows the
medians and their ratio, and ``results/against.json`` has the samples. With ``--quick`` all of it takes
about fifteen minutes.

Each module measures one thing and is a list of :class:`benchmarks.harness.Case`. Machines are shared
and noisy, so everything is repeated, what is compared is interleaved, and what counts is the median
and the ratio to a reference measured in the same run.
"""
