"""``headrace report``: what a broker did over some time, as one page of HTML with plots.

::

    collecting   numbers out of the log, ``__events`` and ``__pipelines``, by Spark
    plots        numbers as drawings (SVG)
    page         all of it as one page

The page is complete in itself: no script, no font, no picture from elsewhere. It follows the reader's theme, and every
plot has its numbers in a table below it.
"""
