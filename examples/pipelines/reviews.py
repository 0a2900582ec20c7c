"""Reviews, read by Python: a function for DataFrames, and one for each row.

    headrace publish reviews 'lamp: **** bright'
    headrace pipeline run examples/pipelines/reviews.py --once

What ``stars_of`` raises is a dead letter with that reason; the query goes on.
"""

import re

from headrace.spark.pipelines import each_row, pipeline


@pipeline(from_="reviews", format="text", to={"topic": "stars", "key": "product"}, failed=True)
def stars(reviews):
    """From lines such as ``lamp: **** bright`` to products with a number of stars."""
    return each_row(reviews.select("value"), stars_of, "product STRING, stars INT")


def stars_of(row):
    found = re.match(r"(\w+): (\*{1,5})(?!\*)", row["value"])
    if found is None:
        raise ValueError("it has no product, or not one to five stars")
    return {"product": found[1], "stars": len(found[2])}


@pipeline(from_="reviews", to="reviews-by-minute", mode="complete")
def reviews_by_minute(reviews):
    """How many came in each minute, whole again with every batch."""
    from pyspark.sql import functions as F

    minutes = reviews.groupBy(F.window("timestamp", "1 minute").start.alias("minute"))
    return minutes.count()
